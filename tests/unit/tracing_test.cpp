// Causal tracing on random models: the batched computation against full passes, averages by hand, heat maps.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/evaluation/tracing.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/error_of.h"
#include "support/hash_tokenizer.h"
#include "support/trace_reference.h"

namespace emend::evaluation {
namespace tracing_test {

using testing::worded_model;

datasets::Fact fact() {
  datasets::Fact fact;
  fact.subject = "tall iron tower";
  fact.prompt = "the {} is in";
  fact.target_true = "Paris";
  return fact;
}

TraceOptions options() {
  TraceOptions options;
  options.noise = 2.0;
  options.samples = 3;
  options.window = 2;
  options.precision = 0;
  return options;
}

/// Whatever the model predicts.
FactTrace trace_fact(const models::Model& model, const datasets::Fact& fact, TraceOptions options) {
  options.any_answer = true;
  return trace_facts(model, {fact}, options).traces.at(0);
}

class EveryTracedFamily : public ::testing::TestWithParam<testing::FamilyFlavour> {};

TEST_P(EveryTracedFamily, BatchedTraceEqualsFullPasses) {
  const auto model = worded_model(GetParam());
  datasets::Fact one = fact();
  // Longer than such models were trained for: their frequencies are those of the whole prompt.
  if (model.config().rotary_depends_on_length()) one.prompt = "the {} of the old grey town is in";
  const FactTrace expected = trace_fact_reference(model, one, options());
  for (const auto& [batch_tokens, precision] : {std::pair{1, 0.0}, {4096, 0.0}, {50, 1e-12}}) {
    TraceOptions given = options();
    given.batch_tokens = batch_tokens;
    given.precision = precision;
    const FactTrace got = trace_fact(model, one, given);
    EXPECT_EQ(got.answer, expected.answer);
    EXPECT_NEAR(got.clean, expected.clean, 1e-9);
    EXPECT_NEAR(got.corrupted, expected.corrupted, 1e-9);
    EXPECT_EQ(got.subject_begin, 1);
    EXPECT_EQ(got.subject_end, 4);
    EXPECT_GT(std::abs(got.clean - got.corrupted), 1e-6) << "the noise must matter";
    ASSERT_EQ(got.restored.size(), 3U);
    for (const auto& [kind, rows] : expected.restored)
      for (size_t t = 0; t < rows.size(); ++t)
        for (size_t l = 0; l < rows[t].size(); ++l)
          ASSERT_NEAR(got.restored.at(kind)[t][l], rows[t][l], 1e-9)
              << to_string(kind) << " token " << t << " layer " << l;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EveryTracedFamily, ::testing::ValuesIn(testing::all_flavours()),
                         [](const auto& info) { return info.param.family + "_" + info.param.flavour; });

TEST(Tracing, RestoringEverythingThatReachesTheAnswerGivesTheCleanRun) {
  const auto model = worded_model({"llama", ""});
  const FactTrace trace = trace_fact(model, fact(), options());
  // The last token's state at the last layer is all that the answer is read from.
  EXPECT_NEAR(trace.restored.at(TraceKind::kState).back().back(), trace.clean, 1e-9);
  // Before the subject nothing is noised, so nothing is restored.
  for (double p : trace.restored.at(TraceKind::kMlp)[0]) EXPECT_EQ(p, trace.corrupted);
}

TEST(Tracing, DrawsStopWhereTheEffectIsKnown) {
  const auto model = worded_model({"llama", ""});
  TraceOptions all = options(), some = options(), few = options();
  all.samples = some.samples = few.samples = 8;
  some.precision = 0.002;
  few.precision = 1;
  const FactTrace exact = trace_fact(model, fact(), all), near = trace_fact(model, fact(), some),
                  rough = trace_fact(model, fact(), few);
  EXPECT_EQ(exact.draws, 8);
  EXPECT_EQ(rough.draws, 2);
  EXPECT_LE(near.draws, 8);
  EXPECT_EQ(near.corrupted, exact.corrupted) << "the noised run always has all draws";
  for (const auto& [kind, rows] : exact.restored)
    for (size_t t = 0; t < rows.size(); ++t)
      for (size_t l = 0; l < rows[t].size(); ++l) EXPECT_NEAR(near.restored.at(kind)[t][l], rows[t][l], 0.02);
  // What restores everything, or nothing, is exact after two draws already.
  const auto& states = rough.restored.at(TraceKind::kState);
  EXPECT_NEAR(states.back().back(), rough.clean, 1e-9);
  EXPECT_NEAR(states[1].back(), rough.corrupted, 1e-9) << "of another token in the last layer";
}

TEST(Tracing, PassesHaveNoMoreTokensThanAsked) {
  const auto model = worded_model({"llama", ""});
  TraceOptions few = options();
  few.batch_tokens = 13;
  int64_t most = 0;
  hooks::HookSession session(model.hooks());
  session.edit({hooks::Site::kLayerOut, 0}, [&](const at::Tensor& x) {
    most = std::max(most, x.size(0));
    return at::Tensor();
  });
  session.attach();
  const FactTrace trace = trace_fact(model, fact(), few);
  session.finish();
  EXPECT_EQ(most, 12) << "two draws of " << trace.tokens.size() << " tokens";
}

TEST(Tracing, RefusesNumbersThatAreNotFinite) {
  auto model = worded_model({"llama", ""});
  const auto refused = [&](double noise, bool any_answer = false) {
    TraceOptions given = options();
    given.noise = noise;
    given.any_answer = any_answer;
    return testing::error_of([&] { (void)trace_facts(model, {fact()}, given); }, ErrorClass::kNumeric);
  };
  EXPECT_NE(refused(1e300, true).find("take less noise"), std::string::npos);
  const std::string name = model.weight_names().back();
  model.set_weight(name, at::full_like(model.weight(name), NAN));
  EXPECT_NE(refused(2.0).find("logits that are not finite"), std::string::npos) << "not: the model knows none";
  for (const auto& each : model.weight_names()) model.set_weight(each, at::full_like(model.weight(each), NAN));
  EXPECT_NE(refused(0).find("embeddings"), std::string::npos);
}

TEST(Tracing, TracesOnlyWhatTheModelKnowsAndIsDeterministic) {
  const auto model = worded_model({"llama", ""}, true);
  datasets::Fact known = fact();
  const int64_t answer = trace_fact(model, known, options()).answer;
  // A word that the tokenizer maps to the model's answer.
  for (int i = 0;; ++i) {
    known.target_true = "word" + std::to_string(i);
    if (model.tokenizer().encode_ids(" " + *known.target_true)[0] == answer) break;
    ASSERT_LT(i, 100000);
  }
  datasets::Fact unknown = fact();
  unknown.target_true = *known.target_true + "x";
  TraceOptions given = options();
  given.noise = 0;  // measured
  const TraceSummary summary = trace_facts(model, {unknown, known, known}, given);
  EXPECT_EQ(summary.facts, 2);
  EXPECT_EQ(summary.skipped, 1);
  EXPECT_NEAR(summary.noise, 3 * embedding_deviation(model, {unknown, known, known}), 1e-12);
  EXPECT_EQ(summary.traces[0].restored, summary.traces[1].restored);
  given.any_answer = true;
  EXPECT_EQ(trace_facts(model, {unknown}, given).facts, 1);
  given.any_answer = false;
  given.max_facts = 1;
  EXPECT_EQ(trace_facts(model, {known, known}, given).facts, 1);
  given.cancel.request();
  EXPECT_THROW((void)trace_facts(model, {known}, given), Error);
}

TEST(Tracing, MeasuresTheSubjectsEmbeddings) {
  const auto model = worded_model({"llama", ""});
  datasets::Fact one = fact();
  const auto ids = model.tokenizer().encode_ids(one.subject);
  std::string name;
  for (const auto& candidate : model.weight_names())
    if (candidate.find("embed_tokens") != std::string::npos) name = candidate;
  const at::Tensor rows = model.weight(name).index_select(0, at::tensor(ids, at::kLong));
  EXPECT_NEAR(embedding_deviation(model, {one}), rows.std().item<double>(), 1e-6);
  EXPECT_THROW((void)embedding_deviation(model, {}), Error);
}

TEST(Tracing, RefusesFactsWithoutTheirSubject) {
  const auto model = worded_model({"llama", ""});
  datasets::Fact wrong = fact();
  wrong.prompt = datasets::with_slot("the tall iron tower is in", "bridge");
  EXPECT_THROW((void)trace_fact(model, wrong, options()), Error);
  TraceOptions none = options();
  none.noise = NAN;
  EXPECT_THROW((void)trace_fact(model, fact(), none), Error);
}

TEST(Tracing, TheSubjectIsWhereThePromptSays) {
  const auto model = worded_model({"llama", ""});
  datasets::Fact one = fact();
  one.subject = "iron";
  one.prompt = "the iron gate of the {} tower is in";
  const FactTrace placed = trace_fact(model, one, options());
  EXPECT_EQ(placed.fact.full_prompt(), "the iron gate of the iron tower is in");
  EXPECT_EQ(placed.subject_begin, 5);
  EXPECT_EQ(placed.subject_end, 6);
  one.prompt = datasets::with_slot("the iron gate of the iron tower is in", one.subject);
  EXPECT_EQ(trace_fact(model, one, options()).subject_begin, 1);
}

/// A trace of 7 tokens, subject 1…3, whose restored probability is 0.1 · token + 0.01 · layer.
FactTrace made_up() {
  FactTrace trace;
  trace.tokens = {"a", " b", " c", " d", " e", " f", " g"};
  trace.subject_begin = 1;
  trace.subject_end = 4;
  trace.corrupted = 0.05;
  trace.clean = 0.9;
  trace.answer_text = " <x> & y";
  for (TraceKind kind : {TraceKind::kState, TraceKind::kMlp})
    for (int t = 0; t < 7; ++t) trace.restored[kind].push_back({0.1 * t, 0.1 * t + 0.01, 0.1 * t + 0.02});
  return trace;
}

TEST(TraceSummaryTest, AveragesByKindOfToken) {
  TraceSummary summary;
  summary.n_layers = 3;
  summary.facts = 2;
  FactTrace short_subject = made_up();
  short_subject.subject_begin = 1;
  short_subject.subject_end = 2;
  summary.traces = {made_up(), short_subject};
  average(summary, {TraceKind::kState, TraceKind::kMlp});
  const auto& effect = summary.effect.at(TraceKind::kState);
  ASSERT_EQ(effect.size(), 6U);
  EXPECT_NEAR(effect[0][0], 0.1 - 0.05, 1e-12);  // only the longer subject has a first token
  EXPECT_NEAR(effect[1][1], 0.21 - 0.05, 1e-12);
  EXPECT_NEAR(effect[2][0], (0.3 + 0.1) / 2 - 0.05, 1e-12);                        // last subject token: 3 and 1
  EXPECT_NEAR(effect[3][0], (0.4 + 0.2) / 2 - 0.05, 1e-12);                        // first subsequent: 4 and 2
  EXPECT_NEAR(effect[4][2], (0.52 + (0.32 + 0.42 + 0.52) / 3) / 2 - 0.05, 1e-12);  // further: 5; 3, 4, 5
  EXPECT_NEAR(effect[5][0], 0.6 - 0.05, 1e-12);
  EXPECT_NEAR(summary.clean, 0.9, 1e-12);
  const auto suggestion = suggest_layers(summary, 2);
  EXPECT_EQ(suggestion["peak"], 2);
  EXPECT_EQ(suggestion["layers"], nlohmann::json({1, 2}));
  EXPECT_THROW((void)suggest_layers({}, 2), Error);
  // Six layers, windows of two: the windows of layers 0 and 1 hold the first MLP.
  summary.window = 2;
  summary.n_layers = 6;
  for (auto& trace : summary.traces)
    for (auto& row : trace.restored.at(TraceKind::kMlp)) row = {0.9, 0.8, 0.3, 0.5, 0.4, 0.1};
  average(summary, {TraceKind::kMlp});
  const auto deeper = suggest_layers(summary, 3);
  EXPECT_EQ(deeper["peak"], 3);
  EXPECT_EQ(deeper["layers"], nlohmann::json({1, 2, 3}));
  const auto says = [&](const std::string& what, int count = 3) {
    return suggest_layers(summary, count)["why"].dump().find(what) != std::string::npos;
  };
  EXPECT_TRUE(says("has the largest effect: 0.450 ± 0.000 of probability, 53 % of what noise") ||
              says("has the largest effect: 0.450 of probability, 53 % of what noise"))
      << deeper["why"];
  EXPECT_TRUE(says("that end at the peak"));
  EXPECT_TRUE(says("Within one standard error of that peak: layer 3.")) << deeper["why"];
  EXPECT_FALSE(says("that end at the peak", 5)) << "four end there";
  EXPECT_EQ(deeper["caveat"], deeper["why"].back());
  summary.facts = 10;
  EXPECT_EQ(suggest_layers(summary, 3)["caveat"], "") << "two standard errors above nothing";
  for (auto& trace : summary.traces)
    for (auto& row : trace.restored.at(TraceKind::kMlp)) row.assign(6, 0.05);
  average(summary, {TraceKind::kMlp});
  EXPECT_TRUE(says("brings nothing back"));
  EXPECT_FALSE(says("largest effect"));
  EXPECT_EQ(suggest_layers(summary, 3)["caveat"], suggest_layers(summary, 3)["why"][0]);
  EXPECT_NEAR(deeper["effect"].get<double>(), 0.45, 1e-12);
}

}  // namespace tracing_test
}  // namespace emend::evaluation
