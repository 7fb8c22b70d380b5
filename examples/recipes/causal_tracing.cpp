// Causal tracing by hand: the subject is blotted out, then one clean state at a time is put back.
#include "recipe.h"

void causal_tracing(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site, models::Patch;
  const at::NoGradGuard no_gradients;
  const auto model = models::load_placed(model_path);
  const std::string prompt = "The Eiffel Tower is in the city of";
  std::vector<hooks::SiteRef> states;
  for (int layer = 0; layer < model.n_layers(); ++layer) states.push_back({Site::kLayerOut, layer});
  const auto clean = model.trace(prompt, states);
  const auto [begin, end] = clean.span("The Eiffel Tower");
  std::vector<int64_t> subject;
  for (int64_t token = begin; token < end; ++token) subject.push_back(token);
  const auto blotted = Patch::mean({Site::kEmbedding}).tokens(subject);

  const int64_t answer = clean.logits[0][-1].argmax().item<int64_t>();
  const auto chance = [&](const models::Trace& run) {
    return at::softmax(run.logits[0][-1], -1)[answer].item<double>();
  };
  const double low = chance(model.trace(prompt, {}, {blotted})), high = chance(clean);
  for (const auto& state : states) {
    double best = -1;
    int64_t where = 0;
    for (int64_t token = begin; token < clean.batch.tokens(); ++token) {
      const auto restored = model.trace(prompt, {}, {blotted, Patch::swap(state, clean).tokens({token})});
      const double share = (chance(restored) - low) / (high - low);
      if (share > best) best = share, where = token;
    }
    std::cout << to_string(state) << ": token " << where << " brings back " << best << "\n";
  }
}
