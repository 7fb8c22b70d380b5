// Names that resemble a subject's, at which an edit of it should not be heard.
#pragma once

#include <emend/core/cancel.h>
#include <emend/models/model.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace emend::editors {

struct LookalikeOptions {
  int64_t count = 12;   ///< of a subject, at most
  int64_t samples = 3;  ///< lists that the model writes for a subject
  uint64_t seed = 0;
  CancelToken cancel;
};

/// The names in a list with commas, but for the last, which may be cut off: once each, without those that contain the
/// subject.
[[nodiscard]] std::vector<std::string> names_of(const std::string& list, const std::string& subject);

/// For each subject up to `count` names of its kind: what the model that is edited writes behind three lists of names
/// and the subject ("Airbus A340," → "Airbus A350, Airbus A380"). Often fewer, sometimes none, as where the request
/// does not fit into the model. The model is not changed. Throws Error(kCancelled).
[[nodiscard]] std::vector<std::vector<std::string>> lookalikes(const models::Model& model,
                                                               std::span<const std::string> subjects,
                                                               const LookalikeOptions& options);

}  // namespace emend::editors
