// A run that a program embeds: it edits, judges, saves and reports, and is taken up again where it was interrupted.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/evaluation.h>
#include <emend/models/config.h>
#include <emend/models/placing.h>
#include <emend/workflow/card.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>
#include <emend/workflow/variants.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/simulated.h"

namespace emend::workflow {
namespace run_test {

using testing::all_weights;
using testing::changed_weights;

TEST(Card, TellsTheMeasurementsOfThePacksOwnRun) {
  const testing::TemporaryFolder folder("card");
  write_file(folder / "results.json", R"({"edits": {"applied": 1}})");
  editors::EditPack pack;
  pack.facts = nlohmann::json::array({{{"prompt", "Ada lives in"}}});
  EXPECT_TRUE(results_of_run(folder / "edit.safetensors", pack).is_object());
  EXPECT_TRUE(results_of_run(folder / "other.safetensors", pack).is_null());
  pack.facts.push_back(pack.facts[0]);
  EXPECT_TRUE(results_of_run(folder / "edit.safetensors", pack).is_null()) << "of other facts";
  const auto results = nlohmann::ordered_json::parse(
      R"({"metrics": {"health": {"pre": {"n": 20000, "perplexity": 19.754321},
                                 "post": {"n": 20000, "perplexity": 54321.6, "lambada_perplexity": 1.5e9}}}})");
  const std::string card = model_card("base", {{"edit", pack, results}}, "pack");
  testing::expect_parts(card, {"| health | n | 20000 | 20000 |\n", "| health | perplexity | 19.75 | 54322 |\n",
                               "| health | lambada\\_perplexity |  | 1.5e+09 |\n"});
}

// What fits without the copy that computes in bfloat16 does not fit with it, and the way out is told.
TEST(RequireRoom, CountsTheCopyThatComputes) {
  const nlohmann::json config = {{"model_type", "llama"},       {"hidden_size", 256},
                                 {"num_hidden_layers", 6},      {"num_attention_heads", 4},
                                 {"num_key_value_heads", 2},    {"intermediate_size", 1024},
                                 {"vocab_size", 257},           {"max_position_embeddings", 256},
                                 {"tie_word_embeddings", true}, {"rms_norm_eps", 1e-5}};
  const auto checkpoint = testing::byte_checkpoint(models::random_checkpoint(config, 1));
  datasets::FactSet facts;
  facts.facts = {testing::tiny_facts()[0]};
  RunOptions options{.editor = "memit", .hparams = "gpt2-xl", .watch = false};
  options.set = {"layers=[0,1]", "v_loss_layer=5", "context_template_length_params=[[1,5]]"};
  options.metrics.names = {"counterfact"};
  options.model.device_map = "sim:1";
  const testing::SimulatedLimitScope as_before(0, 0);
  const auto refusal = [&](const std::string& arithmetic, int64_t kib) -> std::string {
    options.compute_dtype = arithmetic;
    options.model.max_memory = "sim:0=" + std::to_string(kib) + "KiB";
    try {
      require_room(options, *checkpoint, facts, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kDevice);
      return error.what();
    }
    return "";
  };
  int64_t kib = int64_t{64} << 10;
  while (refusal("float32", kib * 15 / 16).empty()) kib = kib * 15 / 16;
  const std::string text = refusal("bfloat16", kib);
  EXPECT_NE(text.find("targets of one fact"), std::string::npos) << kib << ": " << text;
  EXPECT_NE(text.find("float32 fits"), std::string::npos) << text;
}

class RunTest : public ::testing::Test {
 protected:
  [[nodiscard]] static std::string fixture(const std::string& name) {
    return std::string(EMEND_SOURCE_DIR) + "/tests/fixtures/tiny_llama" + name;
  }
  [[nodiscard]] RunOptions options(const std::string& out) const {
    return {.hparams = fixture("/memit.yaml"),
            .metrics = {.names = {"counterfact"}},
            .batch_size = 1,
            .corpus = fixture("/corpus.txt"),
            .eval_at = {"each"},
            .out = (folder_.path() / out).string()};
  }
  static datasets::FactSet four_facts() {
    auto facts = datasets::load_facts(fixture("/facts.jsonl"));
    for (const char* subject : {"The Elbe", "Kenya"}) {
      facts.facts.push_back(facts.facts[0]);
      facts.facts.back().subject = subject;
      facts.facts.back().case_id = std::ssize(facts.facts);
    }
    facts.fingerprint.clear();
    return facts;
  }
  // A file with one layer, few steps and, of an editor that reads texts, few of them.
  [[nodiscard]] std::string hparams_of(const editors::EditorInfo& info, int steps) const {
    std::string text;
    for (const auto& field : info.fields()) {
      if (field.name == "layers") text += "layers: [1]\n";
      if (field.name == "v_num_grad_steps" || field.name == "num_steps")
        text += field.name + ": " + std::to_string(steps) + "\n";
      if (field.name == "crowd") text += "crowd: 3\ntext_tokens: 64\ncrowd_tokens: 256\n";
    }
    if (text.empty()) text = info.fields().at(0).name + ": " + info.fields()[0].default_text + "\n";
    write_file(folder_ / "hparams.yaml", text);
    return (folder_ / "hparams.yaml").string();
  }
  testing::TemporaryFolder folder_{"run"};
};

TEST(PassTokens, AreMoreOnGpusAsFarAsMemoryGoes) {
  const models::ModelConfig config = [] {
    models::ModelConfig c;
    c.hidden_size = 4096, c.mlp_width = 16384, c.n_kv_heads = 16, c.head_dim = 256, c.n_layers = 28;
    return c;
  }();
  const c10::Device gpu(c10::kCUDA, 0), cpu(c10::kCPU);
  const auto machine = [&](int64_t gib) {
    return std::vector<devices::DeviceInfo>{{cpu, "", "", 0, int64_t{1} << 40}, {gpu, "", "", 0, gib << 30}};
  };
  const std::vector<c10::Device> whole(28, gpu), none(28, cpu);
  auto mixed = whole;
  mixed[3] = cpu;
  EXPECT_EQ(pass_tokens(config, none, 2, machine(80)), kPassTokens);
  EXPECT_EQ(pass_tokens(config, mixed, 2, machine(80)), kPassTokens) << "the host is the slower one";
  EXPECT_GT(pass_tokens(config, whole, 2, machine(66)), 2 * kPassTokens);
  EXPECT_LE(pass_tokens(config, whole, 2, machine(1000)), 8 * kPassTokens);
  EXPECT_EQ(pass_tokens(config, whole, 2, machine(4)), kPassTokens);
}

TEST(EvalAt, IsOneScheduleBesideTheEnd) {
  EXPECT_FALSE(parse_eval_at({"end"}).each);
  EXPECT_TRUE(parse_eval_at({"each", "end"}).each);
  EXPECT_EQ(parse_eval_at({"end", "every=3"}).every, 3);
  for (const auto& wrong : std::vector<std::vector<std::string>>{
           {"each", "every=3"}, {"every=3", "each"}, {"every=2", "end", "every=3"}, {"sometimes"}, {"every=0"}, {""}})
    EXPECT_THROW((void)parse_eval_at(wrong), Error) << wrong.front();
}

TEST(EvalAt, LifelongRunsAreMeasuredTenTimes) {
  const auto measurements = [](int64_t n, int64_t batch, const EvalSchedule& schedule = {}) {
    int64_t count = 1;  // the end
    for (int64_t begin = 0; begin + batch < n; begin += batch) count += schedule.due(begin, begin + batch, n, true);
    return count;
  };
  for (const int64_t n : {10, 11, 19, 100, 101, 2000}) EXPECT_EQ(measurements(n, 1), 10) << n;
  EXPECT_EQ(measurements(2000, 50), 10);
  EXPECT_EQ(measurements(5, 2), 3) << "as many as there are batches";
  EXPECT_EQ(measurements(2000, 50, {.every = 500}), 4);
  EXPECT_FALSE(EvalSchedule{}.due(0, 1, 1, false));
}

TEST(MetricsTable, KeepsItsColumnsApart) {
  const nlohmann::json summary = {
      {"counterfact", {{"n", 2}, {"efficacy_magnitude", 0.034}, {"ci95", {{"efficacy_magnitude", {0.021, 0.047}}}}}},
      {"free", {{"n", 2}, {"neutral_kl", 0.00042}, {"edit_begins", 50.0}, {"neighborhood_first_token_kept", 100.0}}},
      {"health", {{"n", 1}, {"perplexity", 123456789.0}, {"lambada_perplexity", 2.5e12}}}};
  const std::string text = metrics_table({{"before", summary}, {"after", summary}});
  testing::expect_parts(text, {"  1.23e+08  1.23e+08", "  0.0004  0.0004", "  0.03  0.02 – 0.05", "  50.00   50.00"});
  // The columns of a family end at one place.
  std::istringstream lines(text);
  size_t end = 0;
  for (std::string line; std::getline(lines, line) && !line.starts_with("health");)
    if (line.starts_with("free")) {
      end = line.find("before") + 6;
    } else if (end > 0) {
      EXPECT_NE(line[end - 1], ' ') << line;
    }
}

TEST(Summary, SaysAllAndNoneOnlyWhereItIsSo) {
  const auto told = [](size_t said, size_t all) {
    RunRecord record;
    record.verdicts.resize(all);
    for (size_t i = 0; i < said; ++i) record.verdicts[i].verdict = Verdict::kSaid;
    datasets::FactSet facts;
    facts.facts.resize(all);
    const std::string text = summary_text(record, facts);
    const size_t at = text.find('(') + 1;
    return text.substr(at, text.find(';') - at);
  };
  EXPECT_EQ(told(300, 300), "100 %");
  EXPECT_EQ(told(299, 300), "99.67 %");
  EXPECT_EQ(told(2, 3), "67 %");
  EXPECT_EQ(told(1, 300), "0.33 %");
  EXPECT_EQ(told(0, 300), "0 %");
  EXPECT_EQ(told(29999, 30000), "99.99 %");
}

TEST_F(RunTest, GoesOnAfterAnInterruption) {
  const auto facts = datasets::load_facts(fixture("/facts.jsonl"));
  auto model = models::load_placed(fixture(""));
  const auto before = all_weights(model);
  {
    workflow::Run whole(model, facts, options("whole"));
    whole.execute();
    EXPECT_EQ(whole.record().count(Verdict::kFailed), 0);
    EXPECT_EQ(whole.record().verdicts.size(), 2U);
    EXPECT_EQ(whole.record().batches.size(), 2U);
    EXPECT_EQ(whole.record().guard.size(), 2U);
    EXPECT_NE(whole.summary().find("none failed"), std::string::npos) << whole.summary();
    EXPECT_EQ(whole.cases()[1]["target_true"], "Paris");
    EXPECT_FALSE(whole.cases()[1].contains("relation_id")) << "not known";
    EXPECT_FALSE(changed_weights(model, before).empty()) << "a lent model stays edited";
    whole.session().undo();
  }
  ASSERT_TRUE(changed_weights(model, before).empty());

  auto cut = options("cut");
  {
    const auto first_batch = folder_.path() / "cut" / "checkpoint" / "batch-000000.safetensors";
    std::string phase;
    const auto go_on = [&](const ProgressUpdate& update) {
      phase = update.phase;
      return !std::filesystem::exists(first_batch);
    };
    workflow::Run run(model, facts, cut, {.progress = stopping(go_on)});
    EXPECT_THROW(run.execute(), Error);
    EXPECT_EQ(phase, "evaluate") << "between the batches, for retention";
  }
  EXPECT_TRUE(changed_weights(model, before).empty()) << "a run that failed leaves a lent model as it was";
  cut.resume = true;
  workflow::Run resumed(model, facts, cut);
  resumed.execute();
  EXPECT_EQ(resumed.record().guard.size(), 2U) << "of the batch that was there already, too";
  EXPECT_EQ(resumed.results()["retention"]["edits_applied"], nlohmann::json({1, 2}));
  EXPECT_EQ(read_file(folder_.path() / "cut" / "edit.safetensors"),
            read_file(folder_.path() / "whole" / "edit.safetensors"));
  EXPECT_EQ(read_file(folder_.path() / "cut" / "cases.jsonl"), read_file(folder_.path() / "whole" / "cases.jsonl"));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "cut" / "report.html"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "cut" / "checkpoint"));
}

// Also while the model is asked what it knows already, before anything else.
TEST_F(RunTest, CanBeStoppedBeforeItsFirstBatch) {
  auto model = models::load_placed(fixture(""));
  const Handles never{.progress = stopping([](const ProgressUpdate&) { return false; })};
  testing::error_of([&] { workflow::Run run(model, four_facts(), options("never"), never); }, ErrorClass::kCancelled);
  CancelToken cancel;
  cancel.request();
  testing::error_of([&] { workflow::Run run(model, four_facts(), options("nor-then"), {.cancel = cancel}); },
                    ErrorClass::kCancelled);
}

// Also after the correction that `prune` makes once at the end, which here takes what the edits had done.
TEST_F(RunTest, TheLastRowOfRetentionIsTheStateThatStays) {
  auto model = models::load_placed(fixture(""));
  for (const char* editor : {"memit", "prune"}) {
    auto at = options(std::string("last-") + editor);
    at.editor = editor;
    at.eval_at = {"every=2"};
    if (at.editor == "prune") {
      at.hparams = (folder_.path() / "prune.yaml").string();
      write_file(at.hparams, read_file(fixture("/memit.yaml")) + "restraint_base: 1e9\n");
    }
    workflow::Run run(model, four_facts(), at);
    run.execute();
    EXPECT_EQ(run.record().batches.size(), at.editor == "prune" ? 5U : 4U) << "the correction is one of its own";
    const auto document = run.results();
    EXPECT_EQ(document["retention"]["edits_applied"], nlohmann::json({2, 4})) << editor;
    const auto held = evaluation::evaluate_efficacy(model, four_facts().facts);
    const auto share = evaluation::success_share(held, evaluation::any_compared(held));
    ASSERT_TRUE(share) << editor;
    EXPECT_EQ(document["retention"]["edited_success"].back(), 100 * share->value) << editor;
    run.session().undo();
  }
}

// Interrupted after two of four batches, by editors with and without a memory; the text that `latch` reads grows then.
// And after the guard had stopped the run with the first one.
TEST_F(RunTest, EverySequenceGoesOnToTheSameBytes) {
  const auto facts = four_facts();
  auto model = models::load_placed(fixture(""));
  const auto expect_same = [&](const std::string& name, const std::function<RunOptions(const std::string&)>& at) {
    const auto run = [&](const RunOptions& options, Handles lent = {}) {
      workflow::Run run(model, facts, options, std::move(lent));
      run.execute();
      run.session().undo();
      return run.stopped();
    };
    const bool stopped = run(at("whole"));
    auto cut = at("cut");
    const auto second = std::filesystem::path(cut.out) / "checkpoint" / "batch-000001.safetensors";
    const auto go_on = [&](const ProgressUpdate&) { return !std::filesystem::exists(second); };
    if (name != "ike") {  // which has nothing to do
      EXPECT_THROW(run(cut, {.progress = stopping(go_on)}), Error) << name;
      cut.resume = true;
    }
    EXPECT_EQ(run(cut), stopped) << name;
    for (const char* file : {"edit.safetensors", "cases.jsonl"})
      EXPECT_TRUE(read_file(std::filesystem::path(at("whole").out) / file) ==
                  read_file(std::filesystem::path(cut.out) / file))
          << name << ", " << file;
  };
  for (const auto& info : editors::all_editors()) {
    const auto hparams = hparams_of(info, 2);
    expect_same(info.name, [&](const std::string& out) {
      auto one = options(info.name + "-" + out);
      one.editor = info.name;
      one.hparams = hparams;
      one.metrics.names = {"none"};
      one.eval_at = {"end"};
      return one;
    });
  }
  expect_same("stopped", [&](const std::string& out) {
    auto one = options("stopped-" + out);
    one.on_collapse = "stop";
    one.guard.divergence = 1e-30;
    return one;
  });
}

TEST_F(RunTest, CurvesEndWhereTheGuardStopsTheRun) {
  const auto facts = four_facts();
  auto model = models::load_placed(fixture(""));
  const auto run = [&](const std::string& out, double divergence, bool lifelong) {
    auto one = options(out);
    one.on_collapse = divergence > 0 ? "stop" : "warn";
    one.guard.divergence = divergence > 0 ? divergence : 1e-30;
    if (lifelong) one.protocol = "lifelong";
    workflow::Run run(model, facts, one);
    run.execute();
    run.session().undo();
    return std::pair(run.record(), run.results());
  };
  // The last batch that drives the model further than all before it, and a limit that it alone is beyond.
  const auto readings = run("readings", 0, false).first.guard;
  size_t last = 0;
  double before = 0, limit = 0;
  for (size_t i = 0; i < readings.size(); ++i) {
    const double there = readings[i].divergence;
    if (there <= before) continue;
    limit = (before + there) / 2, last = i, before = there;
  }
  ASSERT_GT(last, 0U);
  nlohmann::json edits = nlohmann::json::array();
  for (size_t i = 1; i <= last; ++i) edits.push_back(i);
  const auto [record, results] = run("lifelong", limit, true);
  nlohmann::json measured = nlohmann::json::array();
  for (const auto& entry : results["lifelong"]) measured.push_back(entry["edits"].get<int64_t>());
  EXPECT_EQ(measured, edits);
  EXPECT_EQ(record.count(Verdict::kFailed), static_cast<int64_t>(readings.size() - last));
  EXPECT_EQ(run("retention", limit, false).second["retention"]["edits_applied"], edits);
  EXPECT_TRUE(run("nothing", 1e-30, true).first.measured.lifelong.empty()) << "nothing is in force";
}

// What ran before in the same process, or comes later, has no part in the peaks of a run.
TEST_F(RunTest, EachRunHasItsOwnPeaks) {
  constexpr int64_t kLarge = int64_t{256} << 20;
  const auto take_much = [] {
    (void)at::empty({kLarge}, at::TensorOptions().device(testing::sim(0)).dtype(at::kByte));
  };
  const auto peak = [](const auto& results) { return results.at("peak_bytes").at("sim:0").template get<int64_t>(); };
  auto model = models::load_placed(fixture(""), {.device_map = "sim:0"});
  auto alone = options("alone");
  alone.metrics.names = {"none"};
  take_much();
  workflow::Run run(model, datasets::load_facts(fixture("/facts.jsonl")), alone);
  run.execute();
  take_much();
  EXPECT_LT(peak(run.results()), kLarge);
  Comparison comparison;
  comparison.variants = parse_variants({"rome"}, {}, 0);
  comparison.common = options("compared");
  comparison.common.model = {.model = fixture(""), .device_map = "sim:0"};
  comparison.common.facts.file = fixture("/facts.jsonl");
  comparison.common.hparams = fixture("/rome.yaml");
  comparison.common.metrics.names = {"none"};
  comparison.common.eval_at = {"end"};
  Handles lent;
  compare_variants(std::move(comparison), lent);
  EXPECT_LT(peak(read_json(folder_ / "compared/rome/results.json")), kLarge);
}

TEST_F(RunTest, SavesInEveryForm) {
  const auto facts = datasets::load_facts(fixture("/facts.jsonl"));
  auto model = models::load_placed(fixture(""));
  auto all = options("all");
  all.save.clear();
  for (const auto& format : save_formats()) all.save.push_back(format.name);
  workflow::Run run(model, facts, all);
  run.execute();
  for (const auto& format : save_formats())
    EXPECT_TRUE(std::filesystem::exists(folder_.path() / "all" / format.file)) << format.name;
  EXPECT_THROW((void)save_format("floppy"), Error);
}

// A fact that is said already, and one that a single step does not bring; and, by a guard that takes everything back,
// facts that fail.
TEST_F(RunTest, OneVerdictInEveryPlaceForEveryEditor) {
  auto facts = datasets::load_facts(fixture("/facts.jsonl"));
  auto model = models::load_placed(fixture(""));
  ASSERT_FALSE(evaluation::answers(model, facts.facts)[0].said);
  // The fewest characters of its own text that are whole words of it.
  const std::string own =
      evaluation::write_on(model, {facts.facts[0].full_prompt()}, {.whole_sentence = false})[0].text;
  size_t end = 1;
  const auto begins = [&] {
    const std::string part = own.substr(0, end);
    return !evaluation::plain_words(part).empty() && evaluation::begins_with(own, part);
  };
  while (end < own.size() && !begins()) ++end;
  facts.facts[0].target_new = evaluation::plain_words(own.substr(0, end));
  ASSERT_TRUE(evaluation::answers(model, facts.facts)[0].said) << own;
  facts.fingerprint.clear();
  std::map<Verdict, int> seen;
  for (const auto& info : editors::all_editors())
    for (const bool fails : {false, true}) {
      auto small = options(info.name + (fails ? "-fails" : ""));
      small.editor = info.name;
      small.hparams = hparams_of(info, 1);
      small.metrics.names = {"none"};
      small.eval_at = {"end"};
      if (fails) small.on_collapse = "skip", small.guard.divergence = 1e-30;
      workflow::Run run(model, facts, small);
      run.execute();
      const auto edits = run.results()["edits"];
      std::map<std::string, int> lines;
      std::istringstream cases(read_file(std::filesystem::path(small.out) / "cases.jsonl"));
      for (std::string text; std::getline(cases, text);) {
        const auto line = nlohmann::json::parse(text);
        ++lines[line.at("verdict").get<std::string>()];
        EXPECT_EQ(evaluation::judge_case(line, "post").success, line.at("verdict") == "said");
        EXPECT_EQ(line.at("reason").get<std::string>().empty(), line.at("verdict") == "said") << line.dump();
      }
      for (const char* verdict : {"said", "not_said", "failed"})
        EXPECT_EQ(edits[verdict].get<int>(), lines[verdict]) << info.name;
      EXPECT_NE(run.summary().find(std::to_string(lines["said"]) + " said by the model now"), std::string::npos);
      EXPECT_TRUE(run.said_enough()) << "nothing was asked for";
      for (const auto& verdict : run.record().verdicts) ++seen[verdict.verdict];
      EXPECT_EQ(run.session().pack().facts.size(), static_cast<size_t>(lines["said"] + lines["not_said"])) << info.name;
      run.session().undo();
    }
  EXPECT_GT(seen[Verdict::kSaid], 0);
  EXPECT_GT(seen[Verdict::kNotSaid], 0);
  EXPECT_GT(seen[Verdict::kFailed], 0);
}

}  // namespace run_test
}  // namespace emend::workflow
