// Reading the rotary part of config.json, in both spellings.
#pragma once

#include <emend/models/config.h>
#include <emend/models/config_reader.h>
#include <emend/models/family.h>

namespace emend::models::detail {

/// The rotary form described by `dict` (a rope_parameters or rope_scaling object; possibly empty) with defaults from
/// the top level of `reader`. `dims` is filled in from the head size and the fraction.
[[nodiscard]] Rotary read_rotary(const ConfigReader& reader, const ConfigReader& dict, const ConfigKeys& keys,
                                 const ModelConfig& config);

/// The common case: one form for all layers, from rope_parameters or rope_scaling.
void read_common_rotary(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config);

}  // namespace emend::models::detail
