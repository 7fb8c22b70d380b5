// A loss of one's own for a target: the new answer (its last token) beats the old one by a margin, another prompt
// stays.
#include <torch/csrc/autograd/autograd.h>

#include "recipe.h"

void custom_loss(const std::string& model_path, const std::string&) {
  using namespace emend;
  using hooks::Site, models::Patch;
  const auto model = models::load_placed(model_path);
  const std::string prompt = "The Eiffel Tower is in the city of", other = "The Eiffel Tower is";
  const int64_t wanted = model.tokenizer().encode_ids(" Rome").back(),
                old = model.tokenizer().encode_ids(" Paris").back();
  const int64_t token = model.trace(prompt).span("The Eiffel Tower").second - 1;
  const at::Tensor kept = at::log_softmax(model.trace(other).logits[0][-1], -1);

  at::Tensor value = at::zeros({model.hidden_size()}).requires_grad_(true);
  for (int step = 0; step <= 30; ++step) {
    const std::vector<Patch> patch = {Patch::add({Site::kMlpOut, 1}, value).tokens({token})};
    const at::Tensor logits = model.trace(prompt, {}, patch).logits[0][-1];
    const at::Tensor now = at::log_softmax(model.trace(other, {}, patch).logits[0][-1], -1);
    const at::Tensor margin = logits[wanted] - logits[old], drift = (kept.exp() * (kept - now)).sum();
    const at::Tensor loss = at::relu(1 - margin) + 10 * drift;
    if (step % 30 == 0)
      std::cout << "step " << step << ": margin " << margin.item<double>() << ", drift " << drift.item<double>()
                << "\n";
    const at::Tensor gradient = torch::autograd::grad({loss}, {value})[0];
    value = (value - 0.2 * gradient / gradient.norm()).detach().requires_grad_(true);
  }
}
