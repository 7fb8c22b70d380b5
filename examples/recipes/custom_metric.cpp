// A metric of one's own, before and after an edit: the rank of the new answer's first token.
#include "recipe.h"

void custom_metric(const std::string& model_path, const std::string& hparams) {
  using namespace emend;
  auto model = models::load_placed(model_path);
  datasets::Fact fact;
  fact.prompt = "{} is in the city of";
  fact.subject = "The Eiffel Tower";
  fact.target_new = "Rome";
  const auto rank = [&](const datasets::Fact& asked) {
    const at::Tensor logits = model.trace(asked.full_prompt()).logits[0][-1];
    const int64_t id = editors::target_token_ids(model.tokenizer(), asked.full_prompt(), " " + asked.target_new)[0];
    return (logits > logits[id]).sum().item<int64_t>() + 1;
  };
  const int64_t before = rank(fact);
  workflow::Session session(model, {.editor = "rome", .hparams = hparams});
  session.edit({&fact, 1});
  const int64_t after = rank(fact);
  session.undo();
  std::cout << "rank " << before << ", edited " << after << ", undone " << rank(fact) << "\n";
}
