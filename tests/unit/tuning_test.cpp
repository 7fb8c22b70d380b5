// LoRA fine-tuning: rows and labels, gradients, gradient checkpointing, splits, and that the model is left as it was.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/datasets/instructions.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/tuning.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/debug_models.h"
#include "support/error_of.h"
#include "support/simulated.h"
#include "support/tiny_model.h"
#include "support/tiny_tokenizer.h"

namespace emend::editors {
namespace tuning_test {

using testing::TemporaryFolder;

class Tuning : public ::testing::Test {
 protected:
  Tuning() { testing::write_tiny_model(folder_.path()); }
  [[nodiscard]] models::Model model(bool split = false, at::ScalarType dtype = at::kFloat) const {
    models::LoadOptions options;
    options.dtype = dtype;
    if (split)
      options.place = [](const models::ModelConfig& config, const models::Checkpoint&) {
        devices::PlacementPlan plan;
        plan.embedding = plan.position = testing::sim(1);
        for (int64_t l = 0; l < config.n_layers; ++l) plan.layers.push_back(testing::sim(static_cast<int>(l % 2)));
        plan.final_norm = plan.head = testing::sim(1);
        return plan;
      };
    return models::load_model(folder_.path().string(), options);
  }
  static std::vector<datasets::Instruction> instructions() {
    return datasets::parse_instructions(R"([
      {"instruction": "Name a river.", "input": "", "output": "The Elbe."},
      {"instruction": "Name a town.", "input": "in Kenya", "output": "Nakuru."},
      {"instruction": "Count to three.", "output": "One, two, three."},
      {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
                    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Farewell."}]}])",
                                        "rows.json");
  }
  static TuningRows rows_of(const models::Model& model) {
    return tuning_rows(model, instructions(), models::chat_format("instruction"), 200, "rows.json");
  }
  static TuneOptions options() {
    TuneOptions options;
    options.lora.rank = 4;
    options.lr = 5e-3;
    options.batch_size = 2;
    options.steps = 12;
    options.schedule = "constant";
    return options;
  }
  static double distance(const TuneResult& a, const TuneResult& b) {
    double most = 0;
    for (size_t i = 0; i < a.deltas.size(); ++i)
      most = std::max(
          most,
          (devices::to_host(a.deltas[i].matrix()) - devices::to_host(b.deltas[i].matrix())).abs().max().item<double>());
    return most;
  }

  TemporaryFolder folder_{"tuning"};
};

TEST_F(Tuning, AnEpochSeesEveryRow) {
  auto model = this->model();
  const auto rows = rows_of(model).rows;  // four
  auto options = this->options();
  options.steps = 0;
  for (const auto& [batch, epochs, steps] : std::vector<std::tuple<int64_t, double, size_t>>{
           {3, 2, 4}, {8, 3, 3}, {4, 1, 1}, {2, 1.5, 3}, {3, 0.5, 1}, {3, 1e-11, 1}}) {
    options.batch_size = batch;
    options.epochs = epochs;
    EXPECT_EQ(tune(model, rows, options).steps.size(), steps) << batch << " rows, " << epochs << " epochs";
  }
}

TEST_F(Tuning, LabelsAreTheAnswersAlone) {
  const auto model = this->model();
  const auto rows = rows_of(model);
  ASSERT_EQ(rows.rows.size(), 4U);
  const auto learnt = [&](size_t r) {
    std::vector<int64_t> ids;
    for (const auto& [token, id] : rows.rows[r].row.labels) {
      EXPECT_EQ(rows.rows[r].row.ids[static_cast<size_t>(token) + 1], id);
      ids.push_back(id);
    }
    return model.tokenizer().decode(ids);
  };
  const auto eos = model.tokenizer().eos_id();
  const std::string end = eos ? model.tokenizer().token_text(*eos) : "";  // the format has no mark of its own
  EXPECT_FALSE(end.empty());
  EXPECT_EQ(learnt(0), "The Elbe.\n\n" + end);
  EXPECT_EQ(learnt(1), "Nakuru.\n\n" + end);
  EXPECT_EQ(learnt(3), "Hello.\n\nFarewell.\n\n" + end);
  const auto text = model.tokenizer().decode(rows.rows[1].row.ids);
  EXPECT_NE(text.find("Name a town.\nin Kenya"), std::string::npos) << text;
}

TEST_F(Tuning, TheFirstWordIsLearntWithTheBlankBeforeIt) {
  const auto model = this->model();
  for (const char* name : {"llama2", "mistral", "chatglm3", "chatml"}) {
    const auto format = models::chat_format(name, {"", ""});
    const auto rows = tuning_rows(model, instructions(), format, 200, "rows.json");
    std::vector<int64_t> ids;
    for (const auto& [token, id] : rows.rows[0].row.labels) ids.push_back(id);
    const std::string learnt = model.tokenizer().decode(ids);
    EXPECT_TRUE(learnt.starts_with(std::string(name) == "chatml" ? "The Elbe." : " The Elbe.")) << learnt;
  }
}

TEST(ChatFormats, ASystemMessageIsWrittenOrRefused) {
  const std::vector<models::ChatMessage> alone = {{"system", "Be brief."}};
  for (const auto& name : models::chat_format_names()) {
    try {
      const auto chat = models::render_chat(models::chat_format(name), alone, true);
      EXPECT_NE(chat.text.find("Be brief."), std::string::npos) << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("system message"), std::string::npos) << name << error.what();
    }
  }
}

TEST_F(Tuning, LowersTheLossAndLeavesTheModelAlone) {
  auto model = this->model();
  const auto before = model.current_fingerprint();
  auto options = this->options();
  options.steps = 40;
  const auto result = tune(model, rows_of(model).rows, options);
  ASSERT_EQ(result.steps.size(), 40U);
  const auto loss = [&](size_t step) { return result.steps[step].loss + result.steps[step + 1].loss; };  // all rows
  EXPECT_LT(loss(38), 0.8 * loss(0));
  EXPECT_EQ(result.deltas.size(), 8U) << "queries and values of four layers";
  EXPECT_EQ(model.current_fingerprint(), before);
  // The deltas give what the adapters gave.
  EditTransaction transaction(model);
  const LearningPass untrained(model, {rows_of(model).rows[0].row}, 0);
  const double at_first = untrained.measure().nll[0];
  for (const auto& delta : result.deltas) apply_delta(delta, transaction);
  EXPECT_LT(LearningPass(model, {rows_of(model).rows[0].row}, 0).measure().nll[0], at_first);
}

TEST_F(Tuning, GradientsAreThoseOfFiniteDifferences) {
  auto model = this->model(false, at::kDouble);
  LoraShape shape;
  shape.rank = 2;
  shape.alpha = 4;
  LoraAdapters adapters(model, shape);
  const auto parameters = adapters.parameters();
  {
    const at::NoGradGuard no_grad;
    at::manual_seed(5);
    for (auto parameter : parameters) parameter.copy_(at::randn_like(parameter) * 0.1);
  }
  const auto rows = rows_of(model);
  const LearningPass pass(model, {rows.rows[0].row, rows.rows[2].row}, 0);
  const std::vector<double> weights = {0.25, 0.75};
  const auto result = pass.run(weights, [&] { return parameters; });
  const auto loss = [&] {
    const auto nll = pass.measure().nll;
    return 0.25 * nll[0] + 0.75 * nll[1];
  };
  for (const size_t i : {size_t{0}, size_t{3}, parameters.size() - 1}) {
    const at::NoGradGuard no_grad;
    at::Tensor entry = parameters[i].view(-1)[3];
    const double step = 1e-6, value = entry.item<double>();
    entry.fill_(value + step);
    const double up = loss();
    entry.fill_(value - step);
    const double down = loss();
    entry.fill_(value);
    EXPECT_NEAR(result.gradients[i].view(-1)[3].item<double>(), (up - down) / (2 * step), 1e-7) << i;
  }
}

TEST_F(Tuning, CheckpointingChangesNothing) {
  auto model = this->model();
  auto plain = options(), segments = options();
  plain.lora.dropout = segments.lora.dropout = 0.2;
  plain.lora.layers = segments.lora.layers = {1, 2, 3};
  segments.checkpoint_layers = 2;
  const auto rows = rows_of(model);
  const auto a = tune(model, rows.rows, plain), b = tune(model, rows.rows, segments);
  for (size_t i = 0; i < a.steps.size(); ++i) EXPECT_NEAR(a.steps[i].loss, b.steps[i].loss, 1e-4) << i;
  EXPECT_LT(distance(a, b), 1e-4);
}

TEST_F(Tuning, AccumulationEqualsOneLargePass) {
  auto model = this->model();
  auto large = options(), small = options();
  large.batch_size = 4;
  small.batch_size = 1;
  small.accumulation = 4;
  const auto rows = rows_of(model);
  const auto a = tune(model, rows.rows, large), b = tune(model, rows.rows, small);
  for (size_t i = 0; i < a.steps.size(); ++i) EXPECT_NEAR(a.steps[i].loss, b.steps[i].loss, 1e-4) << i;
}

TEST_F(Tuning, ASplitModelLearnsTheSame) {
  auto whole = model(), split = model(true);
  const auto rows = rows_of(whole);
  const auto a = tune(whole, rows.rows, options()), b = tune(split, rows.rows, options());
  for (size_t i = 0; i < a.steps.size(); ++i) EXPECT_NEAR(a.steps[i].loss, b.steps[i].loss, 1e-5) << i;
  EXPECT_LT(distance(a, b), 1e-5);
  EXPECT_EQ(b.deltas.front().left_DR.device(), split.weight(b.deltas.front().weight).device());
}

TEST_F(Tuning, ALabelOutsideTheVocabularyIsNamed) {
  auto model = this->model();
  auto rows = rows_of(model);
  rows.rows[2].row.labels[0].second = 32000;
  testing::expect_error(ErrorClass::kInvalidArgument, {"32000", "257", "label", "tokenizer"},
                        [&] { (void)tune(model, rows.rows, options()); });
}

TEST_F(Tuning, RefusesWhatDoesNotFit) {
  auto model = this->model();
  const auto rows = rows_of(model);
  const auto refused = [&](auto change, const char* word) {
    auto bad = options();
    change(bad);
    testing::expect_error(ErrorClass::kInvalidArgument, {word}, [&] { (void)tune(model, rows.rows, bad); });
  };
  refused([](TuneOptions& o) { o.lora.rank = 0; }, "r:");
  refused([](TuneOptions& o) { o.lora.dropout = 1; }, "lora_dropout");
  refused([](TuneOptions& o) { o.lora.target_modules = {"q_prj"}; }, "q_proj");
  refused([](TuneOptions& o) { o.lora.layers = {1, 99}; }, "layer 99; expected 0 to ");
  refused([](TuneOptions& o) { o.lora.layers = {-1}; }, "layer -1");
  refused([](TuneOptions& o) { o.lr = -1; }, "learning rate");
  refused([](TuneOptions& o) { o.schedule = "sudden"; }, "schedule");
  EXPECT_TRUE(model.current_fingerprint() == this->model().current_fingerprint());
}

TEST(TuningSchedule, WarmsUpAndFalls) {
  TuneOptions options;
  options.lr = 1;
  options.warmup_steps = 3;
  EXPECT_DOUBLE_EQ(learning_rate(options, 0, 10), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(options, 3, 10), 1);
  EXPECT_NEAR(learning_rate(options, 9, 10), 1.0 / 7, 1e-12);
  options.schedule = "cosine";
  EXPECT_NEAR(learning_rate(options, 3 + 7 / 2, 10), 0.5 * (1 + std::cos(M_PI * 3 / 7)), 1e-12);
  options.schedule = "constant";
  EXPECT_DOUBLE_EQ(learning_rate(options, 9, 10), 1);
}

TEST(Instructions, BadRowsNameLineAndField) {
  const auto refused = [](const char* text, const std::vector<std::string>& words) {
    SCOPED_TRACE(text);
    testing::expect_error(ErrorClass::kCorruption, words,
                          [&] { (void)datasets::parse_instructions(text, "rows.jsonl"); });
  };
  refused("{\"instruction\": \"a\", \"output\": \"b\"}\n{\"instruction\": \"a\"}\n", {"rows.jsonl:2", "output"});
  refused("{\"instruction\": \"a\", \"output\": 7}\n", {"rows.jsonl:1", "output"});
  refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", {"rows.jsonl:1", "answer"});
  refused("{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}\n", {"rows.jsonl:1", "robot"});
  refused("{\"conversations\": [{\"from\": \"gpt\", \"value\": \"a\"}]}\n", {"rows.jsonl:1", "turn 1"});
  refused("", {"rows.jsonl"});
  const auto none = [] { (void)datasets::parse_instructions("", "rows.jsonl", 0); };
  EXPECT_EQ(testing::error_of(none, ErrorClass::kInvalidArgument).find("rows"), std::string::npos)
      << "nothing is wrong with these";
}

}  // namespace tuning_test
}  // namespace emend::editors
