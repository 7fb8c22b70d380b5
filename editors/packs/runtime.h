// Edits beside the weights: a codebook (GRACE), a store (NeuralDB), a side memory (WISE), demonstrations (IKE),
// directions to steer by.
//
// Their result is data, a RuntimePart, kept in an edit pack. make_runtime turns the data into behaviour: hooks on a
// model, or text in front of a prompt. No weight changes, so taking the edit out is letting go of the hooks.
//
//   RuntimeScope scope;
//   for (const auto& part : pack.runtime) scope.add(part, model, "edit.safetensors");
//   … scope.prefix(prompt) + prompt, forward passes …          // the edit is in force until the scope ends
//
// Goals: every token is decided by itself, so that padded, packed and cached passes agree. Non-goals: changing weights.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/hooks/hook_point.h>
#include <emend/models/control_vector.h>
#include <emend/models/model.h>

namespace emend::editors {

/// The data of one edit beside the weights. Tensors are on the host, float32, float64 or int64.
struct RuntimePart {
  std::string kind = {};  ///< "grace", "neuraldb", "wise", "ike": that of an editor's RuntimeKind; "steer" (steer_part)
  int version = 1;        ///< of the kind's own layout
  nlohmann::json values = nlohmann::json::object();
  std::map<std::string, at::Tensor> tensors = {};
};

/// The behaviour of one part: one of both.
struct RuntimeEdit {
  /// Attaches the edit; it is in force as long as the handles live. The hooks keep what they need alive.
  std::function<std::vector<hooks::HookHandle>(const models::Model& model)> attach = {};
  /// Text to put in front of a prompt.
  std::function<std::string(std::string_view prompt)> prefix = {};
};

struct RuntimeKind {
  std::string name = {};
  int version = 1;  ///< the newest one that is understood
  RuntimeEdit (*make)(const RuntimePart& part, const models::Model& model, const std::string& where);
};

/// Checks a part against the model. Throws, naming `where`: Error(kUnsupported) for an unknown kind or a newer version,
/// Error(kCorruption) for missing or ill-shaped tensors and values, Error(kInvalidArgument) if it misfits the model.
[[nodiscard]] RuntimeEdit make_runtime(const RuntimePart& part, const models::Model& model, const std::string& where);

/// Edits in force for a scope, in the order in which they were added.
class RuntimeScope {
 public:
  void add(const RuntimePart& part, const models::Model& model, const std::string& where);  ///< throws as make_runtime
  void clear() noexcept;                                                                    ///< takes all edits out
  [[nodiscard]] bool empty() const noexcept { return edits_.empty(); }
  /// What all edits together put in front of a prompt.
  [[nodiscard]] std::string prefix(std::string_view prompt) const;

 private:
  std::vector<RuntimeEdit> edits_;
  std::vector<std::vector<hooks::HookHandle>> handles_;
};

inline constexpr const char* kSteerKind = "steer";
/// A control vector beside the weights: its layers in the options' range, and how they steer. Values: "strength", "by",
/// "decay", "origin" by layer; tensors "direction.N". Several of them act one after the other.
[[nodiscard]] RuntimePart steer_part(const models::ControlVector& vector, const models::SteerOptions& options);

namespace detail {

/// A copy of a tensor of a part, with as many dimensions as `sizes`; -1 stands for any size.
/// Throws Error(kCorruption) naming `where`.
[[nodiscard]] at::Tensor part_tensor(const RuntimePart& part, const std::string& name,
                                     const std::vector<int64_t>& sizes, const std::string& where);
/// Adds `row` to `rows`, which are undefined while there are none.
void append_row(at::Tensor& rows, const at::Tensor& row);
/// The block named by values.layer, checked against the model and against the widths of its rewritten matrix.
[[nodiscard]] models::EditSite part_site(const RuntimePart& part, const models::Model& model, const std::string& where);
/// Hooks at two sites of `layer`: `answer` is given what stood at `in` in this pass, detached, and what it led to at
/// `out`, and returns what goes on instead; an undefined tensor leaves every byte.
[[nodiscard]] std::vector<hooks::HookHandle> attach_answer(
    const models::Model& model, hooks::Site in, hooks::Site out, int layer,
    std::function<at::Tensor(const at::Tensor& in, const at::Tensor& out)> answer);

}  // namespace detail
}  // namespace emend::editors
