// A linear probe over layers: can a question be told from a statement by the last token's state?
#include "recipe.h"

void linear_probe(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site;
  const at::NoGradGuard no_gradients;
  const auto model = models::load_placed(model_path);
  std::vector<std::string> texts;
  for (const char* thing : {"tower", "river", "city", "house", "bridge", "garden", "road", "hill"}) {
    texts.push_back(std::string("Is the ") + thing + " old?");
    texts.push_back(std::string("The ") + thing + " is old.");
  }
  std::vector<hooks::SiteRef> sites;
  for (int layer = 0; layer < model.n_layers(); ++layer) sites.push_back({Site::kLayerOut, layer});
  const auto run = model.trace(texts, sites);
  const at::Tensor label = at::tensor({1.0, -1.0}).repeat({8}).to(at::kFloat);
  const int64_t train = 12;  // the other four texts are the test
  for (const auto& site : sites) {
    std::vector<at::Tensor> rows;
    for (size_t r = 0; r < texts.size(); ++r) rows.push_back(run.at(site, static_cast<int64_t>(r), -1));
    const at::Tensor x = at::stack(rows), seen = x.narrow(0, 0, train);
    const at::Tensor system = seen.t().matmul(seen) + 0.1 * at::eye(x.size(1));
    const at::Tensor probe = at::linalg_solve(system, seen.t().matmul(label.narrow(0, 0, train)));
    const at::Tensor right = x.narrow(0, train, 4).matmul(probe).sign() == label.narrow(0, train, 4);
    std::cout << to_string(site) << ": " << right.to(at::kFloat).mean().item<double>() << " of unseen texts\n";
  }
}
