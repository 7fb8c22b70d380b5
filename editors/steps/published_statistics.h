// Second moments as the MEMIT repository publishes them: one .npz file a layer with the entries mom2.mom2 (the moment)
// and mom2.count (the tokens).
#pragma once

#include <emend/editors/steps/statistics.h>

#include <filesystem>
#include <memory>
#include <string>

namespace emend::editors {

/// Throws Error(kNotFound) if there is no such file or it lacks "mom2.mom2", Error(kCorruption) for a damaged file or a
/// moment that is not a finite, square, symmetric matrix.
[[nodiscard]] SecondMoment read_published_moment(const std::filesystem::path& path);

/// Moments from the files that `pattern` names, "{layer}" standing for the layer's number, read when a layer is first
/// prepared. prepare() throws Error(kInvalidArgument) for moments of another width than the model's keys. The files say
/// nothing of the model they were made with: that is for the caller to know.
[[nodiscard]] std::unique_ptr<StatisticsProvider> make_published_statistics(std::string pattern, Log log = {});

}  // namespace emend::editors
