// The figures of the default model, before and after a change of its weights, against a second implementation in
// Python (evaluate_with_transformers.py) on real data: CounterFact prompt by prompt, zsRE, EasyEdit's dialects, MQuAKE
// by greedy decoding, what the model writes text by text, LAMBADA, perplexity, PIQA.
//
// The run is kept short; EMEND_TRANSFORMERS_SCALE=N takes N times as many rows.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/health.h>
#include <emend/models/checkpoint.h>

#include "support/default_model.h"
#include "support/python.h"
#include "support/shared.h"

namespace emend::evaluation {
namespace metrics_transformers_test {

using nlohmann::json;
namespace fs = std::filesystem;

int64_t scaled(int64_t count) {
  const char* scale = std::getenv("EMEND_TRANSFORMERS_SCALE");
  return count * std::max(1, scale ? std::atoi(scale) : 1);
}

struct DataSet {
  const char *name, *file, *family;
  int64_t rows;
};
const std::vector<DataSet>& data_sets() {
  static const std::vector<DataSet> sets = {{"counterfact", "counterfact_full.json", "counterfact", scaled(1)},
                                            {"zsre", "zsre_mend_eval.json", "zsre", scaled(3)},
                                            {"easyedit", "counterfact_easyedit.json", "easyedit", scaled(3)},
                                            {"knowedit", "knowedit_wiki_recent.json", "easyedit", scaled(2)},
                                            {"mquake", "mquake_hard.json", "mquake", scaled(1)}};
  return sets;
}

fs::path data() {
  return testing::shared_dir() / "data";
}

using State = std::map<std::string, Evaluation>;

State evaluate_all(const models::Model& model, const State* before) {
  State state;
  for (const auto& set : data_sets()) {
    datasets::ReadOptions read;
    read.limit = set.rows;
    EvaluateOptions options;
    if (before) options.before = &before->at(set.name);
    std::vector<std::string> families = {set.family};
    if (set.family == std::string("counterfact")) {
      families.emplace_back("free");
      options.free_style = "both";
    }
    state[set.name] = evaluate(model, datasets::load_facts(data() / set.file, read), families, options);
  }
  return state;
}

json health(const models::Model& model) {
  json out;
  const auto text = perplexity(model, read_file(data() / "wikitext2_valid.txt").substr(0, 200000), 512, scaled(512));
  out["perplexity"] = {{"perplexity", text.value}, {"tokens", text.tokens}};
  for (const auto& task : load_health_tasks(data(), scaled(4))) {
    if (task.name == "lambada") {
      const auto result = lambada(model, task.texts);
      out["lambada"] = {{"accuracy", result.accuracy}, {"perplexity", result.perplexity}};
    } else if (task.name == "piqa") {
      out["piqa"] = multiple_choice(model, task.choices).accuracy;
    }
  }
  return out;
}

/// Every number of `expected` is in `got`, within `tolerance`; a key with a dot is a path.
void compare(const json& expected, const json& got, const std::string& path, double tolerance) {
  for (const auto& [key, value] : expected.items()) {
    const size_t dot = key.find('.');
    const json* at = &got;
    for (const auto& part : dot == std::string::npos
                                ? std::vector<std::string>{key}
                                : std::vector<std::string>{key.substr(0, dot), key.substr(dot + 1)}) {
      ASSERT_TRUE(at->is_object() && at->contains(part)) << path << key << " is missing in " << got.dump();
      at = &at->at(part);
    }
    if (value.is_null()) {
      EXPECT_TRUE(at->is_null()) << path << key;
    } else {
      EXPECT_NEAR(at->get<double>(), value.get<double>(), tolerance) << path << key;
    }
  }
}

/// Mean negative log-likelihoods of every prompt and target, and whether every token is the argmax.
void compare_cases(const json& expected, const std::vector<json>& got, const std::string& path) {
  ASSERT_EQ(expected.size(), got.size());
  double largest = 0;
  for (size_t i = 0; i < got.size(); ++i)
    for (const auto& [key, values] : expected[i].items()) {
      const json& own = got[i].at("counterfact").at(key);
      ASSERT_EQ(own.size(), values.size()) << path << i << " " << key;
      for (size_t p = 0; p < values.size(); ++p) {
        if (values[p].is_boolean()) {
          EXPECT_EQ(own[p], values[p]) << path << i << " " << key << " " << p;
          continue;
        }
        for (const char* target : {"target_new", "target_true"}) {
          const double mine = own[p].at(target).get<double>(), theirs = values[p].at(target).get<double>();
          EXPECT_NEAR(mine, theirs, 1e-4) << path << i << " " << key << " " << p << " " << target;
          EXPECT_NEAR(std::exp(-mine), std::exp(-theirs), 1e-4);
          largest = std::max(largest, std::abs(mine - theirs));
        }
      }
    }
  std::cout << path << "largest difference of a prompt's nll " << largest << '\n';
}

/// Every text that the model writes, and how it is read.
void compare_free(const json& expected, const std::vector<json>& got, const std::string& path) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i)
    for (const auto& [group, texts] : expected[i].items())
      for (size_t t = 0; t < texts.size(); ++t)
        for (const auto& [key, value] : texts[t].items()) {
          const json& own = got[i].at("free").at(group).at(t).at(key);
          if (key == "kl") {
            EXPECT_NEAR(own.get<double>(), value.get<double>(), 2e-3) << path << group << t;
          } else {
            EXPECT_EQ(own, value) << path << group << t << " " << key;
          }
        }
}

void compare_state(const json& reference, const State& state, const json& checked, const std::string& when) {
  // 1e-4 of a percentage point: rates must agree exactly, magnitudes to float32 rounding.
  for (const auto& set : data_sets())
    compare(reference[set.name], state.at(set.name).summary.at(set.family), when + set.name + " ", 1e-4);
  compare_cases(reference["counterfact_cases"], state.at("counterfact").cases, when + "counterfact case ");
  compare_free(reference["free_cases"], state.at("counterfact").cases, when + "free ");
  const auto& groups = state.at("mquake").groups;
  ASSERT_EQ(groups.size(), reference["mquake_groups"].size());
  for (size_t i = 0; i < groups.size(); ++i)
    for (const char* key : {"hops", "questions", "old_questions"})
      EXPECT_EQ(groups[i].at("mquake").at(key), reference["mquake_groups"][i][key]) << when << i << " " << key;
  EXPECT_NEAR(checked["piqa"].get<double>(), reference["piqa"].get<double>(), 1e-9);
  EXPECT_EQ(checked["perplexity"]["tokens"], reference["perplexity"]["tokens"]);
  for (const char* task : {"perplexity", "lambada"}) {
    const double mine = checked[task]["perplexity"].get<double>(), theirs = reference[task]["perplexity"].get<double>();
    EXPECT_NEAR(mine / theirs, 1, 1e-3) << when << task;
    std::cout << when << task << " " << mine << " and " << theirs << '\n';
  }
  EXPECT_NEAR(checked["lambada"]["accuracy"].get<double>(), reference["lambada"]["accuracy"].get<double>(), 0.1);
}

TEST(MetricsTransformers, EveryFigureAgreesBeforeAndAfterAChange) {
  EMEND_NEEDS_SHARED();
  EMEND_NEEDS_DEFAULT_MODEL();
  EMEND_NEEDS_PYTHON();
  const auto folder = fs::path(::testing::TempDir()) / ("emend-transformers-" + std::to_string(::getpid()));
  fs::create_directories(folder);
  auto model = models::load_model(testing::default_model_path().string());
  models::save_model(model, folder / "model", at::kFloat);
  const State before = evaluate_all(model, nullptr);
  const json health_before = health(model);

  // A change that moves every figure: one matrix scaled, another with its rows rolled by one.
  std::vector<std::pair<std::string, at::Tensor>> changed;
  for (const auto& [layer, roll] : {std::pair{4, 0}, {9, 1}}) {
    const std::string name = model.edit_site(layer).weight_name;
    const at::Tensor value = roll ? model.weight(name).roll({roll}, {0}).contiguous() : model.weight(name) * 1.7;
    changed.emplace_back(name, value);
    model.set_weight(name, value);
  }
  write_safetensors(folder / "changed.safetensors", changed);
  const State after = evaluate_all(model, &before);
  const json health_after = health(model);

  json counts = {{"lambada", scaled(4)}, {"perplexity", scaled(512)}, {"choices", scaled(4)}};
  for (const auto& set : data_sets()) counts[set.name] = set.rows;
  write_file(folder / "counts.json", counts.dump());
  const auto quoted = [](const fs::path& path) { return "'" + path.string() + "' "; };
  const std::string command =
      quoted(testing::test_python()) +
      quoted(fs::path(EMEND_SOURCE_DIR) / "tests" / "integration" / "evaluate_with_transformers.py") +
      quoted(folder / "model") + quoted(data()) + quoted(folder / "changed.safetensors") +
      quoted(folder / "counts.json") + "> " + quoted(folder / "out.json") + "2> " + quoted(folder / "log.txt");
  ASSERT_EQ(std::system(command.c_str()), 0) << read_file(folder / "log.txt");
  const json expected = json::parse(read_file(folder / "out.json"));
  compare_state(expected.at("before"), before, health_before, "before ");
  compare_state(expected.at("after"), after, health_after, "after ");
  EXPECT_GT(expected["after"]["perplexity"]["perplexity"], expected["before"]["perplexity"]["perplexity"])
      << "the change must matter";
  if (!HasFailure()) fs::remove_all(folder);
}

}  // namespace metrics_transformers_test
}  // namespace emend::evaluation
