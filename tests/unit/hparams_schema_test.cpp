#include <emend/hparams/locate.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/schema.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::hparams {
namespace hparams_schema_test {

struct ToyHparams : LocateHparams {
  ToyHparams() {
    clamp_norm_factor = 4;  // another default than the base's
    layers = {};
  }
  double mom2_update_weight = 15000;
  std::optional<double> norm_constraint;
  std::vector<std::string> target_modules = {"q_proj"};
  std::vector<double> weights;
  std::optional<bool> flag;
  int64_t batch = 3;
};

const Schema<ToyHparams>& toy_schema() {
  static const auto schema =
      Schema<ToyHparams>("toy")
          .include(locate_schema())
          .field("mom2_update_weight", &ToyHparams::mom2_update_weight,
                 {.meaning = "weight of the old keys", .formula = "lambda", .min = 0})
          .field("norm_constraint", &ToyHparams::norm_constraint, {.meaning = "largest change of a weight", .above = 0})
          .field("target_modules", &ToyHparams::target_modules, {.meaning = "modules", .min_items = 1})
          .field("weights", &ToyHparams::weights, {.meaning = "numbers", .min = 0, .max = 1})
          .field("flag", &ToyHparams::flag, {.meaning = "a switch"})
          .field("batch", &ToyHparams::batch, {.meaning = "rows", .min = 1, .aliases = {"rows"}})
          .unused("kl_old", "read but never used")
          .check("batch", [](const ToyHparams& h) {
            return h.batch > 100 && h.weights.empty() ? std::string("weights with batches above 100") : "";
          });
  return schema;
}

class Collected : public LogSink {
 public:
  void write(const LogEvent& event) override { events.push_back(event); }
  std::vector<LogEvent> events;
};

using testing::expect_parts;

std::string refusal(const std::string& text, const std::string& source = "toy.yaml") {
  return testing::error_of([&] { (void)toy_schema().parse(parse_hparams(text, source)); },
                           ErrorClass::kInvalidArgument);
}

constexpr const char* kMinimal = "layers: [4, 5]\n";

TEST(HparamsSchema, ReadsEveryTypeFromYaml) {
  const auto h = toy_schema().parse(parse_hparams(R"(
# a comment
layers: [4, 5, 8]
fact_token: "last"
v_lr: 5e-1
v_num_grad_steps: 2e1
v_loss_layer: 31
v_weight_decay: 1.0E-3
kl_factor: +.25
mom2_adjustment: False
context_template_length_params: [[5, 10], [10, 10]]
norm_constraint: 5e-4
target_modules:
  - c_attn
  - "c_proj"
weights: [0, 0.5, 1]
flag: on
rows: 7
)",
                                                  "a.yaml"));
  EXPECT_EQ(h.layers, (std::vector<int64_t>{4, 5, 8}));
  EXPECT_EQ(h.fact_token, "last");
  EXPECT_DOUBLE_EQ(h.v_lr, 0.5);
  EXPECT_EQ(h.v_num_grad_steps, 20);
  EXPECT_EQ(h.v_loss_layer, 31);
  EXPECT_DOUBLE_EQ(h.v_weight_decay, 0.001);
  EXPECT_DOUBLE_EQ(h.kl_factor, 0.25);
  EXPECT_FALSE(h.mom2_adjustment);
  EXPECT_EQ(h.context_template_length_params, (std::vector<std::vector<int64_t>>{{5, 10}, {10, 10}}));
  EXPECT_DOUBLE_EQ(h.norm_constraint.value(), 5e-4);
  EXPECT_EQ(h.target_modules, (std::vector<std::string>{"c_attn", "c_proj"}));
  EXPECT_EQ(h.weights, (std::vector<double>{0, 0.5, 1}));
  EXPECT_EQ(h.flag, true);
  EXPECT_EQ(h.batch, 7);
}

TEST(HparamsSchema, ReadsJsonWithTypes) {
  const auto h = toy_schema().parse(parse_hparams(R"({"layers": [3, 4], "v_lr": 5e-1, "norm_constraint": false,
    "mom2_adjustment": true, "context_template_length_params": [[5, 10]], "fact_token": "subject_last", "v_loss_layer": null})",
                                                  "a.json"));
  EXPECT_EQ(h.layers, (std::vector<int64_t>{3, 4}));
  EXPECT_FALSE(h.norm_constraint.has_value());
  EXPECT_FALSE(h.v_loss_layer.has_value());
  const auto compact =
      parse_hparams("{\n\t\"layers\":[4,5],\r\n\t\"text\":\"a\\/b \\u00e9\\n\",\"none\":\"null\"}", "c.json");
  EXPECT_EQ(compact.find("layers")->value.show(), "[4, 5]");
  EXPECT_EQ(compact.find("text")->value.text, "a/b é\n");
  EXPECT_EQ(compact.find("text")->where, "c.json:3");
  EXPECT_EQ(compact.find("none")->value.kind, RawValue::Kind::kScalar) << "a string, not null";
  expect_parts(refusal("{\n\"layers\": [1],\n \"v_lr\": \"0.5\"}", "b.json"),
               {"b.json:3: v_lr is \"0.5\"", "expected a number above 0"});
  expect_parts(refusal("{\"layers\": [1], \"fact_token\": 3}"), {"fact_token is 3", "one of subject_last"});
}

TEST(HparamsSchema, DefaultsAreTheStructs) {
  const auto h = toy_schema().parse(parse_hparams(kMinimal, "a.yaml"));
  EXPECT_DOUBLE_EQ(h.clamp_norm_factor, 4);
  EXPECT_FALSE(h.v_loss_layer.has_value());
  EXPECT_EQ(h.mom2_dataset, "wikipedia");
  for (const FieldInfo& field : toy_schema().fields())
    if (field.name == "clamp_norm_factor") {
      EXPECT_EQ(field.default_text, "4.0");
    }
}

TEST(HparamsSchema, RefusesUnknownKeysWithTheClosestName) {
  expect_parts(refusal("layers: [4]\nv_lrr: 0.5\n"), {"toy.yaml:2: unknown field \"v_lrr\"", "did you mean \"v_lr\"?"});
  expect_parts(
      refusal("layers: [4]\n\nbanana_split: 1\n"),
      {"toy.yaml:3", "unknown field \"banana_split\"", "mom2_update_weight", "check that the file is for this editor"});
}

TEST(HparamsSchema, RefusesMissingIllTypedAndOutOfRange) {
  expect_parts(refusal("v_lr: 0.5"), {"toy.yaml: layers is missing", "list of integers", "give set layers="});
  expect_parts(refusal("layers: 4"), {"toy.yaml:1: layers is 4", "a list of integers of at least 0"});
  expect_parts(refusal("layers: []"), {"with at least 1 item"});
  expect_parts(refusal("layers: [4, -1]"), {"-1 is not an integer of at least 0"});
  expect_parts(refusal("layers: [4, five]"), {"five is not an integer"});
  expect_parts(refusal("layers: [5, 4]"), {"toy.yaml:1", "ascending order"});
  expect_parts(refusal("layers: [4]\nv_lr: fast"),
               {"toy.yaml:2: v_lr is fast", "expected a number above 0", "learning rate"});
  for (const char* bad : {"0", "-1", ".inf", "nan", "1e999", "0x10", "1,5", "true", "[1]", "{a: 1}", "", "~", "\"\""})
    expect_parts(refusal(std::string("layers: [4]\nv_lr: ") + bad), {"toy.yaml:2: v_lr is"});
  for (const char* bad : {"1.5", "1e30", "abc", "false"})
    expect_parts(refusal(std::string("layers: [4]\nv_num_grad_steps: ") + bad), {"an integer of at least 1"});
  for (const char* bad : {"1", "0", "maybe", "[true]", "\"true\""})
    expect_parts(refusal(std::string("layers: [4]\nmom2_adjustment: ") + bad), {"true or false"});
  expect_parts(refusal("layers: [4]\nfact_token: subject_lost"),
               {"one of subject_last, subject_first", "did you mean \"subject_last\"?"});
  expect_parts(refusal("layers: [4]\nweights: [0.5, 2]"),
               {"a list of numbers from 0 to 1", "2 is not a number from 0 to 1"});
  expect_parts(refusal("layers: [4]\ncontext_template_length_params: [[5, 10, 1]]"), {"pairs of length and number"});
  expect_parts(refusal("layers: [4]\ncontext_template_length_params: [5, 10]"), {"list of lists"});
  expect_parts(refusal("layers: [4]\ncontext_template_length_params: [[10, 3]]"), {"is [[10, 3]]", "5 or more"});
  expect_parts(refusal("layers: [4]\nnorm_constraint: true"), {"a number above 0, or none"});
  expect_parts(refusal("layers: [4]\nbatch: 101"), {"toy.yaml:2: batch is 101", "weights with batches above 100"});
  expect_parts(refusal("layers: [4]\nbatch: 2\nrows: 3"), {"another name for batch"});
}

TEST(HparamsSchema, AnOverrideReplacesUnderAnyName) {
  RawHparams raw = parse_hparams(std::string(kMinimal) + "batch: 2\n", "a.yaml");
  raw.set("rows=5");
  EXPECT_EQ(toy_schema().parse(raw).batch, 5);
}

TEST(HparamsSchema, OverridesAreTypedLikeTheFile) {
  RawHparams raw = parse_hparams(kMinimal, "a.yaml");
  raw.set("v_lr=0.1");
  raw.set("v_lr=2e-1");  // the last one wins
  raw.set("layers=3,4,7");
  raw.set("norm_constraint=none");
  raw.set("fact_token=last");
  raw.set("mom2_adjustment=false");
  const auto h = toy_schema().parse(raw);
  EXPECT_DOUBLE_EQ(h.v_lr, 0.2);
  EXPECT_EQ(h.layers, (std::vector<int64_t>{3, 4, 7}));
  EXPECT_EQ(h.fact_token, "last");
  EXPECT_FALSE(h.mom2_adjustment);
  raw.set("v_lr=quick");
  testing::expect_refused([&] { (void)toy_schema().parse(raw); }, ErrorClass::kInvalidArgument,
                          {"set v_lr=quick: v_lr is quick", "a number above 0"});
  for (const char* bad : {"v_lr", "=1", "a b=1", "v_lr=[1", "v_lr=*x", "\"v_lr\"=1"})
    EXPECT_THROW(raw.set(bad), Error) << bad;
}

TEST(HparamsSchema, MachineSettingsGiveOneWarningAndSuggestions) {
  const std::string text = R"(alg_name: "MEMIT"
model_name: "./hugging_cache/llama-2-7b"
stats_dir: "./data/stats"
device: 0
layers: [4]
layer_selection: "all"
model_parallel: true
batch_size: 10
max_length: 40
fp16: true
kl_old: 3
rewrite_module_tmp: "model.layers.{}.mlp.down_proj"
)";
  const RawHparams raw = parse_hparams(text, "easy.yaml");
  auto sink = std::make_shared<Collected>();
  const auto h = toy_schema().parse(raw, Log({sink}));
  EXPECT_EQ(h.modules.rewrite_module_tmp, "model.layers.{}.mlp.down_proj");
  ASSERT_EQ(sink->events.size(), 1U);
  EXPECT_EQ(sink->events[0].level, LogLevel::kWarning);
  expect_parts(sink->events[0].text, {"easy.yaml", "device: 0 ignored", "model_parallel: true ignored (use device_map)",
                                      "fp16: true ignored (use dtype)", "batch_size: 10 ignored",
                                      "layer_selection: read by no implementation", "kl_old"});
  EXPECT_EQ(sink->events[0].fields["notes"].size(), 10U);
  const MachineSettings machine = machine_settings(raw);
  EXPECT_EQ(machine.alg_name, "MEMIT");
  const MachineSettings odd = machine_settings(parse_hparams("alg_name: [1]\nbatch_size: many\nfp16: [1]\n", "x"));
  EXPECT_FALSE(odd.alg_name);
  EXPECT_EQ(odd.notes.size(), 3U);
}

TEST(HparamsSchema, KeyDeclaredByTheEditorIsNotAMachineSetting) {
  struct WithBatch {
    int64_t batch_size = 64;
  };
  const auto schema =
      Schema<WithBatch>("ft").field("batch_size", &WithBatch::batch_size, {.meaning = "rows", .min = 1});
  auto sink = std::make_shared<Collected>();
  EXPECT_EQ(schema.parse(parse_hparams("batch_size: 8\n", "x"), Log({sink})).batch_size, 8);
  EXPECT_TRUE(sink->events.empty());
}

TEST(HparamsSchema, DumpRoundTrips) {
  const auto h = toy_schema().parse(
      parse_hparams("layers: [4, 6]\nnorm_constraint: 1e-3\nweights: [0.25]\nln_f_module: model.norm\n", "a"));
  const nlohmann::json dumped = toy_schema().dump(h);
  EXPECT_EQ(dumped.size(), toy_schema().fields().size());
  EXPECT_TRUE(dumped["v_loss_layer"].is_null());
  EXPECT_EQ(dumped["ln_f_module"], "model.norm");
  const auto again = toy_schema().parse(parse_hparams(dumped.dump(1), "dump.json"));
  EXPECT_EQ(toy_schema().dump(again), dumped);
}

TEST(HparamsSchema, WhereNamesTheLineOfAKey) {
  const RawHparams raw = parse_hparams("layers:\n  - 4\n  - 5\nv_lr: 0.5\n", "a.yaml");
  EXPECT_EQ(raw.where("layers"), "a.yaml:1");
  EXPECT_EQ(raw.where("v_lr"), "a.yaml:4");
  EXPECT_EQ(raw.where("absent"), "a.yaml");
}

}  // namespace hparams_schema_test
}  // namespace emend::hparams
