// Attention-head knock-out: every head once without its share.
#include "recipe.h"

void head_knockout(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site, models::Patch;
  const at::NoGradGuard no_gradients;
  const auto model = models::load_placed(model_path);
  const std::string prompt = "The Eiffel Tower is in the city of";
  const auto whole = model.trace(prompt, {{Site::kAttnZ, 0}});
  double worst = 0;
  std::string which;
  for (int layer = 0; layer < model.n_layers(); ++layer)
    for (int64_t head = 0; head < whole[{Site::kAttnZ, 0}].size(2); ++head) {
      const auto run = model.trace(prompt, {}, {Patch::zero({Site::kAttnZ, layer}).heads({head})});
      const double change = (run.logits - whole.logits)[0][-1].abs().max().item<double>();
      if (change > worst) worst = change, which = "layer " + std::to_string(layer) + " head " + std::to_string(head);
    }
  std::cout << which << " matters most: " << worst << "\n";
}
