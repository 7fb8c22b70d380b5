// A locate-then-edit method of one's own: which value at the subject makes the new answer likely, and the smallest
// change of the matrix that gives it for the subject's key. Not committed, so the model is as before in the end.
#include <emend/editors/steps/apply.h>
#include <torch/csrc/autograd/autograd.h>

#include "recipe.h"

void new_method(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site, hooks::SiteRef, models::Patch;
  auto model = models::load_placed(model_path);
  const std::string prompt = "The Eiffel Tower is in the city of";
  const int64_t answer = editors::target_token_ids(model.tokenizer(), prompt, " Rome")[0];
  const SiteRef key_site{Site::kMlpDownIn, 1}, value_site{Site::kMlpDownOut, 1};
  const auto before = model.trace(prompt, {key_site});
  const int64_t token = before.span("The Eiffel Tower").second - 1;
  const auto loss = [&](const models::Trace& run) { return -at::log_softmax(run.logits[0][-1], -1)[answer]; };

  at::Tensor value = at::zeros({model.hidden_size()}).requires_grad_(true);
  for (int step = 0; step < 20; ++step) {
    const auto run = model.trace(prompt, {}, {Patch::add(value_site, value).tokens({token})});
    const at::Tensor gradient = torch::autograd::grad({loss(run)}, {value})[0];
    value = (value - 0.5 * gradient / gradient.norm()).detach().requires_grad_(true);
  }
  const at::Tensor key = before.at(key_site, 0, token).to(at::kDouble);
  editors::EditTransaction scope(model);
  editors::apply_delta(editors::WeightDelta::factors(model.edit_site(1), value.detach().to(at::kDouble).unsqueeze(1),
                                                     (key / key.dot(key)).unsqueeze(1)),
                       scope);
  std::cout << "loss of the answer: " << loss(before).item<double>() << ", edited "
            << loss(model.trace(prompt)).item<double>() << "\n";
}
