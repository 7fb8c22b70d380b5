// The logit lens: what each layer would say if it were the last.
#include "recipe.h"

void logit_lens(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site;
  const at::NoGradGuard no_gradients;
  const auto model = models::load_placed(model_path);
  std::vector<hooks::SiteRef> sites;
  for (int layer = 0; layer < model.n_layers(); ++layer) sites.push_back({Site::kLayerOut, layer});
  const auto run = model.trace("The Eiffel Tower is in the city of", sites);
  for (const auto& site : sites) {
    const at::Tensor logits = model.project(run.at(site, 0, -1).unsqueeze(0))[0];
    std::cout << to_string(site) << ": " << logits.argmax().item<int64_t>() << "\n";
  }
  std::cout << "the model: " << model.next_tokens("The Eiffel Tower is in the city of", 1)[0].id << "\n";
}
