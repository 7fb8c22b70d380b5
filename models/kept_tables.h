// What passes over a batch need on every device besides the weights: indices, masks, rotary tables. They are made on
// the host and copied when a layer of the device is reached, which stalls a GPU at every pass. Who runs one batch many
// times keeps them.
#pragma once

#include <memory>

namespace emend::models {

struct PassTables;  ///< of one batch, in front of one state of a cache

/// While it lives, passes of this thread take from `kept` what they need, if that was made for the same batch, cache
/// lengths and model, and otherwise put there what they have made. Scopes nest.
class KeptTables {
 public:
  explicit KeptTables(std::shared_ptr<PassTables>& kept) noexcept;
  ~KeptTables();
  KeptTables(const KeptTables&) = delete;
  KeptTables& operator=(const KeptTables&) = delete;

 private:
  std::shared_ptr<PassTables>* before_;
};

}  // namespace emend::models
