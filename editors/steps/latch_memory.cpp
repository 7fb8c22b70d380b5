#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/latch_memory.h>
#include <emend/editors/detail/latch_prompts.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/steps/continuations.h>
#include <emend/editors/steps/keys.h>
#include <emend/models/checkpoint.h>

#include <algorithm>
#include <filesystem>

namespace emend::editors::detail {

int64_t subject_number(const std::string& subject) {
  return static_cast<int64_t>(std::stoull(sha256_hex(subject).substr(0, 15), nullptr, 16));
}

void LatchMemory::add(KeptFact fact) {
  std::erase_if(facts, [&](const KeptFact& old) { return old[0] == fact[0] && old[1] == fact[1]; });
  facts.push_back(std::move(fact));
}

void remember(const LatchHparams& hparams, const Written& written, const models::Model& model,
              const EditContext& context, std::vector<LayerMemory>& memory) {
  const auto [begin, end] = written.places;
  if (written.plain.empty() || begin == end) return;
  std::vector<hooks::SiteRef> sites;
  for (size_t place = begin; place < end; ++place)
    sites.push_back({hooks::Site::kMlpIn, static_cast<int>(hparams.all_layers()[place])});
  const auto inputs = collect_at_lookup(model, written.plain, sites, context);
  for (size_t place = begin; place < end; ++place) {
    for (const auto& row : devices::to_host(inputs[place - begin].to(at::kFloat)).unbind(0))
      memory[place].seen.push_back(row.clone());
    memory[place].whose.insert(memory[place].whose.end(), written.whose.begin(), written.whose.end());
  }
}

void take(std::vector<LayerMemory>& memory, const LatchHparams& hparams, const models::Model& model,
          const std::map<std::string, std::vector<int64_t>>& neurons) {
  const auto layers = hparams.all_layers();
  for (size_t place = 0; place < layers.size() && !neurons.empty(); ++place) {
    const std::string down = model.edit_site(static_cast<int>(layers[place])).weight_name;
    for (const auto& [weight, taken] : neurons)
      if (same_weight(weight, down)) memory[place].used.insert(taken.begin(), taken.end());
  }
}

LatchMemory memory_of_edits(const LatchHparams& hparams, const models::Model& model, const EditContext& context) {
  const auto layers = hparams.all_layers();
  LatchMemory memory{.layers = std::vector<LayerMemory>(layers.size())};
  const auto path = model.checkpoint().path();
  for (const auto& [name, pack] : edits_of(path)) {
    for (const auto& fact : pack.facts)
      if (KeptFact kept{text_of(fact, "subject"), text_of(fact, "prompt"), text_of(fact, "target_new")};
          std::ranges::none_of(kept, &std::string::empty))
        memory.add(std::move(kept));
    take(memory.layers, hparams, model, neurons_of(pack));
  }
  if (memory.facts.empty()) return memory;
  context.log.info("edit.earlier", counted(memory.facts.size(), "fact") + " of edits in force in " + path.string() +
                                       " count as earlier ones");
  const auto facts = mapped(memory.facts, [](const KeptFact& kept) {
    datasets::Fact fact;
    fact.subject = kept[0];
    fact.prompt = kept[1];
    fact.target_new = kept[2];
    return fact;
  });
  const RenderedBatch batch =
      render_batch(model, facts, ContextTemplates::plain(), {parse_fact_token(hparams.fact_token)});
  const size_t first = hparams.layers.size();
  Written subjects{.places = {0, first}}, answers{.places = {first, layers.size()}};
  const auto add = [](Written& stage, const PromptRow& opens, const PromptRow& prompt, const std::string& whose) {
    stage.plain.push_back(opens);
    PromptRow& end = stage.plain.emplace_back(prompt);
    end.lookup = std::ssize(end.ids) - 1;
    stage.whose.resize(stage.plain.size(), subject_number(whose));
  };
  for (const RenderedFact& fact : batch.rendered) {
    add(subjects, off_the_sink(fact.rows[0]), fact.rows[0], fact.subject);
    if (const PromptRow said = answered(fact.rows[0], fact.target_ids); std::ssize(said.ids) <= model.max_positions())
      add(answers, said, fact.rows[0], fact.subject + fact.target);
  }
  for (const Written* stage : {&subjects, &answers}) remember(hparams, *stage, model, context, memory.layers);
  return memory;
}

}  // namespace emend::editors::detail
