#include <emend/core/text.h>
#include <emend/workflow/direct/job.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

const std::vector<std::string>& direct_actions() {
  static const std::vector<std::string> actions = {"fit", "steer", "ablate", "bake", "optimise"};
  return actions;
}

void declare_direct(Options& o, DirectOptions& options) {
  using List = std::vector<std::string>;
  const List fit = {"fit"}, optimise = {"optimise"}, steers = {"fit", "steer"},
             changes = {"ablate", "bake", "optimise"}, applies = {"steer", "ablate", "bake", "optimise"};
  List forms;
  for (const auto& format : save_formats()) forms.push_back(format.name);
  o.add("ACTION", &options.action,
        "fit (find the direction between two sets of prompts), steer (a pack that acts while the model computes), "
        "ablate (take it out of what layers write), bake (write it in), optimise (search how strongly and where)",
        {.choices = direct_actions(), .required = true})
      .add("DIR", &options.directions, "folders of fit, or control vectors (.gguf), together",
           {.type = "PATH", .only = applies})
      .field("out", &options.out, "folder to write", {.type = "DIR", .required = true})
      .field("force", &options.force, "replace what is there");
  o.group("Fit")
      .field("positive", &options.positive, "prompts with the behaviour: one a line, or JSON lines",
             {.type = "FILE", .only = fit})
      .field("negative", &options.negative, "prompts without it", {.type = "FILE", .only = fit})
      .field("preset", &options.preset, "a contrast that comes with emend: " + join(direct_preset_names()),
             {.type = "NAME", .only = fit})
      .field("method", &options.fit.method, "difference of means, first principal component, logistic probe",
             {.choices = {"mean", "pca", "probe"}, .only = fit})
      .field("folds", &options.fit.folds, "of the cross-validation", {.limits = {2, 100}, .only = fit})
      .field("apart_from", &options.apart_from, "folder of a direction that the new one gets no share of (repeatable)",
             {.type = "PATH", .only = fit})
      .field("no_chat", &options.no_chat, "prompts as they are, without the chat template");
  o.group("Strength")
      .field("layers", &options.layers, "A-B, both included, from 0; default: all (fit measures the best)",
             {.type = "A-B"})
      .field("strength", &options.change.strength,
             "times the direction; fit: of the steering that is measured; ablate: share taken out; optimise: the most",
             {.limits = {-1e4, 1e4}})
      .field(
          "steer", &options.steer.by,
          "add, or set the coordinate along the direction to the strength, 0 as without the behaviour and 1 with it: "
          "clamp; at-least, at-most: where it is below, above",
          {.choices = {"add", "clamp", "at-least", "at-most"}, .only = steers})
      .field("decay", &options.steer.decay, "the effect falls to nothing over so many tokens of an answer; 0: it stays",
             {.limits = kNonNegative, .only = steers})
      .field("from_layer", &options.change.from_layer, "this layer's direction everywhere; -1: its own",
             {.limits = kCountOrAll, .only = changes})
      .field("preserve_norm", &options.change.preserve_norm, "columns keep their lengths (full rank)",
             {.only = {"ablate"}})
      .field("where", &options.where,
             "answer-start: at the token where an answer begins, the last of each prompt, and not in other texts",
             {.choices = {"everywhere", kAnswerStart}, .only = changes})
      .field("texts", &options.texts,
             "texts whose keys count (ablate: with texts to spare); default: the model's own answers, or the prompts",
             {.type = "FILE", .only = changes})
      .field("spare", &options.spare, "texts that stay as they are (least squares on keys); own: what the model writes",
             {.type = "FILE|own", .only = changes})
      .field("spare_weight", &options.change.spare_weight, "of these texts", {.limits = kNonNegative, .only = changes})
      .field("save", &options.save, join(forms), {.type = "LIST", .choices = forms, .list = true, .only = applies});
  o.group("Optimise")
      .field("trials", &options.search.trials, "how many", {.limits = {1, 100000}, .only = optimise})
      .field("max_kl", &options.search.max_kl, "of the one that is taken: divergence on neutral texts, nat a token",
             {.limits = kPositive, .only = optimise})
      .field("by", &options.by, "what is tried",
             {.type = "LIST", .choices = {"bake", "ablate"}, .list = true, .only = optimise})
      .field("raise", &options.search.raise, "a higher score is better", {.only = optimise})
      .field("search_prompts", &options.search_prompts,
             "asked in every trial; default: the questions of the preset (others judge what was found)",
             {.type = "FILE", .only = optimise})
      .field("neutral", &options.neutral, "prompts that are to stay; default: beginnings of what the model writes",
             {.type = "FILE", .only = optimise})
      .field("seed", &options.search.seed, "of the trials", {.only = optimise})
      .field("resume", &options.resume, "go on with the search that is there", {.only = optimise});
  o.group("Effect")
      .field("prompts", &options.prompts, "asked before and after; default: questions that come with emend",
             {.type = "FILE"})
      .field("scorer", &options.scorers, "scorer of the answers (docs/directions.md); default: the preset's",
             {.type = "FILE"})
      .field("max_new_tokens", &options.effect.max_new_tokens, "of an answer", {.limits = kPositive})
      .field("health_data", &options.health_data, "folder of the health metric's files", {.type = "DIR"})
      .field("no_effect", &options.no_effect, "measure nothing");
}

}  // namespace emend::workflow
