// A control vector beside the weights: a runtime part that steers.
#pragma once

#include <emend/editors/packs/runtime.h>
#include <emend/models/control_vector.h>

namespace emend::editors {

inline constexpr const char* kSteerKind = "steer";

/// The vector's layers in the options' range, and how they steer. Values: "strength", "by", "decay", "origin" by layer;
/// tensors "direction.N". Several of them act one after the other.
[[nodiscard]] RuntimePart steer_part(const models::ControlVector& vector, const models::SteerOptions& options);
[[nodiscard]] RuntimeKind steer_runtime();

}  // namespace emend::editors
