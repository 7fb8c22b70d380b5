// Activation patching per head: how far does each head of one prompt move another prompt's prediction?
#include "recipe.h"

void head_patching(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site, models::Patch;
  const at::NoGradGuard no_gradients;
  const auto model = models::load_placed(model_path);
  const std::string here = "The Eiffel Tower is in", there = "The Colosseum is in";
  std::vector<hooks::SiteRef> sites;
  for (int layer = 0; layer < model.n_layers(); ++layer) sites.push_back({Site::kAttnZ, layer});
  const auto from = model.trace(there, sites), to = model.trace(here, sites);
  const at::Tensor start = to.logits[0][-1], way = from.logits[0][-1] - start;
  double best = -1;
  std::string which;
  for (const auto& site : sites)
    for (int64_t head = 0; head < to[site].size(2); ++head) {
      const auto run = model.trace(here, {}, {Patch::swap(site, from).tokens({-1}).heads({head})});
      const double share = ((run.logits[0][-1] - start).dot(way) / way.dot(way)).item<double>();
      if (share > best) best = share, which = to_string(site) + " head " + std::to_string(head);
    }
  std::cout << which << " goes " << best << " of the way\n";
}
