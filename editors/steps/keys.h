// Keys and values at looked-up tokens.
//   P rows · F key width · D hidden width · N facts
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/steps/prompts.h>
#include <emend/hooks/site.h>

namespace emend::editors {

/// [N·C, F] keys of all contexts, fact-major → [N, F] averages, in the keys' dtype: means within each group of
/// contexts, then over groups, MEMIT's ½ and 1/10 each.
[[nodiscard]] at::Tensor average_keys(const at::Tensor& keys_PF, const ContextTemplates& contexts);

/// The values of the sites at each row's looked-up token, [P, width] each, for the model as it is now. Rows are cut
/// after the token and equal ones are computed once (fast), or run whole, padded and to the last layer (reference).
[[nodiscard]] std::vector<at::Tensor> collect_at_lookup(const models::Model& model, const std::vector<PromptRow>& rows,
                                                        const std::vector<hooks::SiteRef>& sites,
                                                        const EditContext& context);

/// As collect_at_lookup, with `values_ND` (a row a prompt) standing in for what `site` gives at the looked-up tokens.
[[nodiscard]] std::vector<at::Tensor> collect_with(const models::Model& model, const std::vector<PromptRow>& rows,
                                                   hooks::SiteRef site, const at::Tensor& values_ND,
                                                   const std::vector<hooks::SiteRef>& sites,
                                                   const EditContext& context);

/// A pass over the same rows that goes up layer by layer while layers are being edited: what enters a layer is kept, so
/// that each edit costs one layer and not the whole model. Layers are asked for in ascending order; between two calls
/// only weights of layers at or above the last one asked for may change. With `share_beginnings` (fast engine) what
/// many rows begin with is computed once.
class LayerWalk {
 public:
  /// Model and context must outlive the walk.
  LayerWalk(const models::Model& model, const std::vector<PromptRow>& rows, const EditContext& context,
            bool share_beginnings = false);
  ~LayerWalk();
  LayerWalk(const LayerWalk&) = delete;
  LayerWalk& operator=(const LayerWalk&) = delete;

  /// Moves up so that what enters `layer` is known (with the weights as they are now).
  void advance_to(int layer);
  /// [P, F] keys of all rows at the layer advanced to.
  [[nodiscard]] at::Tensor keys() const;
  /// [selected rows, width]: values at a site in this or a higher layer, for the rows `selected`.
  [[nodiscard]] at::Tensor values(hooks::SiteRef site, const std::vector<size_t>& selected) const;
  /// The same of several sites; of all rows unless some are selected.
  [[nodiscard]] std::vector<at::Tensor> read(const std::vector<hooks::SiteRef>& sites,
                                             const std::optional<std::vector<size_t>>& selected = {}) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emend::editors
