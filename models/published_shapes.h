// Sizes of well-known models, to measure what work on them costs without fetching their weights.
#pragma once

#include <emend/models/checkpoint.h>

namespace emend::models {

/// "gpt2-xl", "gpt-j-6b", "llama-3-8b", …
[[nodiscard]] std::vector<std::string> published_shape_names();

/// config.json of that size, as published up to values that change no arithmetic. `layers` > 0: with so many layers
/// only. `width` > 0: with that hidden width, and heads and MLP in proportion. Throws Error(kNotFound) with the closest
/// name, Error(kInvalidArgument) for a width that has no whole number of heads.
[[nodiscard]] nlohmann::json published_shape(const std::string& name, int64_t layers = 0, int64_t width = 0);

/// A checkpoint of that configuration whose tensors are made when they are read and never held: matrices uniform with
/// standard deviation 0.02, norm weights 1, biases 0. The same name, shape and seed give the same tensor.
[[nodiscard]] std::shared_ptr<const Checkpoint> random_weights(nlohmann::json config, const std::string& name,
                                                               uint64_t seed);

/// "shape:gpt-j-6b", "shape:gpt-j-6b/2@MODEL": random weights (seed 0) of that size, here with 2 layers, and the
/// tokenizer of another model; nothing if the name does not begin with "shape:". What open_checkpoint makes of such
/// names. Throws as published_shape and open_checkpoint do.
[[nodiscard]] std::shared_ptr<const Checkpoint> shape_checkpoint(const std::string& name);

}  // namespace emend::models
