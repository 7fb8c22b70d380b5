// Hyper-parameters side by side, a process each: every one has its own model, and says its figure through a pipe.
#include <sys/wait.h>
#include <unistd.h>

#include "recipe.h"

void sweep(const std::string& model_path, const std::string& hparams) {
  using namespace emend;
  const auto loss_with = [&](const std::string& rate) {
    auto model = models::load_placed(model_path);
    datasets::Fact fact;
    fact.prompt = "{} is in the city of";
    fact.subject = "The Eiffel Tower";
    fact.target_new = "Rome";
    workflow::Session session(model, {.editor = "rome", .hparams = hparams, .set = {"v_lr=" + rate}});
    session.edit({&fact, 1});
    const at::Tensor logits = model.trace(fact.full_prompt()).logits[0][-1];
    const int64_t answer = editors::target_token_ids(model.tokenizer(), fact.full_prompt(), " Rome")[0];
    return -at::log_softmax(logits, -1)[answer].item<double>();
  };
  std::vector<std::pair<std::string, int>> running;
  for (const char* rate : {"0.01", "0.1", "0.5"}) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    if (fork() == 0) {  // before this process has loaded or computed anything
      const double loss = loss_with(rate);
      _exit(write(ends[1], &loss, sizeof loss) != sizeof loss);
    }
    close(ends[1]);
    running.emplace_back(rate, ends[0]);
  }
  for (const auto& [rate, end] : running) {
    double loss = 0;
    if (read(end, &loss, sizeof loss) != sizeof loss) throw std::runtime_error("a process failed");
    std::cout << "v_lr " << rate << ": loss " << loss << "\n";
    wait(nullptr);
  }
}
