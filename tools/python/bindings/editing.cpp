#include <emend/core/cache_folder.h>
#include <emend/core/text.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/registry.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>

#include <cmath>

#include "bindings.h"

namespace emend::python {
namespace {

using models::Model;

std::vector<std::string> assignments(const py::object& overrides) {
  std::vector<std::string> list;
  if (overrides.is_none()) return list;
  const auto json = to_json(overrides, "overrides");
  if (!json.is_object()) throw unexpected("overrides", overrides, "a dict such as {\"v_lr\": 0.1}");
  for (const auto& [key, value] : json.items()) {
    for (const auto& single : nlohmann::json::array({value}).flatten())
      if (single.is_number_float() && !std::isfinite(single.get<double>()))
        refuse({"overrides[\"" + key + "\"]", "no number", "a finite number", ""});
    list.push_back(key + "=" + value.dump());
  }
  return list;
}

workflow::RunOptions options_of(const std::string& editor, const py::object& hparams, const py::object& overrides,
                                const std::filesystem::path& corpus, int64_t statistics_tokens, uint64_t seed,
                                const std::string& engine, const std::string& compute_dtype) {
  if (statistics_tokens < 0)
    refuse({"statistics_tokens", std::to_string(statistics_tokens), "0 (as many as are enough) or more", ""});
  workflow::RunOptions options;
  options.editor = editor;
  if (!hparams.is_none()) options.hparams = path_text(hparams, "hparams");
  options.set = assignments(overrides);
  options.corpus = corpus.string();
  options.stats_tokens = statistics_tokens;
  options.seed = seed;
  options.engine = engine;
  options.compute_dtype = compute_dtype;
  return options;
}

// "" is the folder that the programs use as well, None none.
std::string cache_of(const std::optional<std::filesystem::path>& cache) {
  return cache && cache->empty() ? user_cache().string() : cache.value_or("").string();
}

// The model lives as long as the session or the run.
struct PySession {
  std::shared_ptr<Model> model;
  std::unique_ptr<workflow::Session> session;
  std::vector<Callable> callables = {};
};

std::unique_ptr<PySession> make_session(std::shared_ptr<Model> model, const std::string& editor,
                                        const py::object& hparams, const py::object& overrides,
                                        const std::filesystem::path& corpus, int64_t statistics_tokens,
                                        const std::optional<std::filesystem::path>& cache, uint64_t seed,
                                        const std::string& engine, const std::string& compute_dtype,
                                        const py::object& progress) {
  auto options = options_of(editor, hparams, overrides, corpus, statistics_tokens, seed, engine, compute_dtype);
  options.metrics.cache = cache_of(cache);
  auto made = std::make_unique<PySession>();
  workflow::Handles lent{.log = warnings(), .progress = workflow::stopping(progress_of(progress, &made->callables))};
  made->model = std::move(model);
  const py::gil_scoped_release unlocked;
  const PlainTensors plain;
  made->session = std::make_unique<workflow::Session>(*made->model, std::move(options), std::move(lent));
  return made;
}

struct PyRun {
  std::shared_ptr<Model> model;
  std::unique_ptr<workflow::Run> run;
  std::vector<Callable> callables = {};
};

std::unique_ptr<PyRun> run(std::shared_ptr<Model> model, const py::object& facts, const std::string& editor,
                           const std::optional<std::filesystem::path>& out, bool resume, const py::object& hparams,
                           const py::object& overrides, const std::filesystem::path& corpus, int64_t statistics_tokens,
                           const std::optional<std::filesystem::path>& cache, uint64_t seed, const std::string& engine,
                           const std::string& compute_dtype, int64_t batch_size,
                           const std::vector<std::string>& metrics, const std::vector<std::string>& eval_at,
                           const std::string& protocol, const std::string& on_collapse,
                           const std::vector<std::string>& save, bool allow_conflicts, const py::object& progress,
                           const std::string& free_style, const std::filesystem::path& health_data) {
  if (resume && !out) refuse({"resume", "no out", "the folder of the run that goes on, or begins", "name it with out"});
  auto options = options_of(editor, hparams, overrides, corpus, statistics_tokens, seed, engine, compute_dtype);
  options.out = out.value_or("").string();
  options.resume = resume;
  options.metrics.cache = cache_of(cache);
  options.metrics.names = metrics;
  options.metrics.free_style = free_style;
  options.metrics.health_data = health_data.string();
  options.batch_size = batch_size;
  options.eval_at = eval_at;
  options.protocol = protocol;
  options.on_collapse = on_collapse;
  options.save = save.empty() ? std::vector<std::string>{"none"} : save;
  options.allow_conflicts = allow_conflicts;
  auto set = facts_of(facts);
  auto made = std::make_unique<PyRun>();
  made->model = std::move(model);
  workflow::Handles lent{.log = warnings(), .progress = workflow::stopping(progress_of(progress, &made->callables))};
  const py::gil_scoped_release unlocked;
  const PlainTensors plain;
  made->run = std::make_unique<workflow::Run>(*made->model, std::move(set), std::move(options), std::move(lent));
  made->run->execute();
  return made;
}

py::object edit(PySession& self, const py::object& facts, bool allow_conflicts) {
  const auto set = facts_of(facts);
  workflow::RunOptions options;
  options.allow_conflicts = allow_conflicts;
  workflow::refuse_contradictions(set, options);
  return to_python(unlocked([&] {
    const PlainTensors plain;
    return self.session->edit(set.facts).to_json();
  }));
}

// An applied pack: takes itself out again at the end of a `with`. Where nobody holds it, it stays: changes of weights
// in them, what lies beside them with the model.
class Applied {
 public:
  Applied(std::shared_ptr<Model> model, const editors::EditPack& pack, editors::ApplyPackOptions options,
          const std::string& where)
      : model_(std::move(model)), parts_(std::make_shared<Parts>(*model_)) {
    const PlainTensors plain;
    unlocked([&] {
      for (const auto& part : pack.runtime) parts_->beside.add(part, *model_, where);
      options.runtime_apart = true;
      parts_->changes.put_in(pack, options, where);
    });
    if (!pack.runtime.empty()) kept().insert(parts_);
  }
  void revert() {
    unlocked([&] {
      parts_->beside.clear();
      parts_->changes.take_out();
    });
    kept().erase(parts_);
  }
  [[nodiscard]] std::vector<std::string> changed() const { return parts_->changes.transaction().changed(); }
  [[nodiscard]] std::string prefix(const std::string& prompt) const {
    return unlocked([&] { return parts_->beside.prefix(prompt); });
  }

 private:
  struct Parts {
    explicit Parts(Model& model) : changes(model) {}
    workflow::Changes changes;
    editors::RuntimeScope beside;
  };
  [[nodiscard]] std::set<std::shared_ptr<void>>& kept() const { return static_cast<HeldModel&>(*model_).beside; }

  std::shared_ptr<Model> model_;
  std::shared_ptr<Parts> parts_;
};

std::unique_ptr<Applied> apply_pack(std::shared_ptr<Model> model, const py::object& pack, bool force,
                                    const std::vector<std::string>& accept_base) {
  const editors::ApplyPackOptions options{.force = force, .accepted_bases = accept_base};
  if (py::isinstance<editors::EditPack>(pack))
    return std::make_unique<Applied>(std::move(model), pack.cast<const editors::EditPack&>(), options, "pack");
  const auto path = path_text(pack, "pack", "a Pack or the path of one");
  return std::make_unique<Applied>(std::move(model), unlocked([&] { return editors::load_pack(path); }), options, path);
}

size_t facts_in(const PySession& self) {
  size_t count = 0;
  for (const auto& batch : self.session->results()) count += batch.outcomes.size();
  return count;
}

py::list list_editors() {
  py::list list;
  for (const auto& info : editors::all_editors())
    list.append(
        to_python({{"name", info.name}, {"summary", info.summary}, {"paper", info.paper}, {"batch", info.batch}}));
  return list;
}

py::dict deltas(const editors::EditPack& pack) {
  py::dict dict;
  for (const auto& delta : pack.deltas) dict[py::str(delta.weight)] = delta.matrix();
  return dict;
}

void bind_sessions(py::module_& module) {
  py::class_<PySession>(module, "Session", collected<PySession>(),
                        "A sequence of edits of one model by one editor. Changes of weights stay when it ends; edits "
                        "beside the weights (GRACE, WISE, IKE) are in force as long as it lives.")
      .def(py::init(&make_session), py::arg("model").none(false), py::arg("editor") = "", py::kw_only(),
           py::arg("hparams") = py::none(), py::arg("overrides") = py::none(), py::arg("corpus") = "",
           py::arg("statistics_tokens") = 0, py::arg("cache") = "", py::arg("seed") = 0, py::arg("engine") = "fast",
           py::arg("compute_dtype") = "", py::arg("progress") = true,
           "editor: empty is the one that the file of hyper-parameters names (alg_name), else latch where it has a "
           "preset for the model, else memit.\n"
           "hparams: a file or a preset's name; None takes the preset that fits the model.\n"
           "overrides: single hyper-parameters, {\"v_lr\": 0.1}.\n"
           "corpus: text for the key statistics; empty: text that the model samples.\n"
           "cache: folder of key statistics; empty: the one that the programs use; None: none are kept.\n"
           "compute_dtype: arithmetic of the frozen layers while targets are optimised, \"auto\", \"float32\", "
           "\"bfloat16\" or \"tf32\"; empty: auto for latch, else the model's dtype.\n"
           "progress: True draws on standard error; or called as progress(phase, done, total, detail) between steps: "
           "returning False or raising ends the edit and leaves every weight as it was; None: nothing.")
      .def("edit", &edit, py::arg("facts"), py::kw_only(), py::arg("allow_conflicts") = false,
           "Writes one batch into the model: a FactSet, a list of Fact or dict, or the path of a facts file. Returns "
           "what happened, as a dictionary. Facts that cannot be true together are refused unless allow_conflicts.")
      .def(
          "finish", [](PySession& self) { unlocked([&] { self.session->finish(); }); },
          "To be called once after the last batch (PRUNE corrects the sum of all changes here).")
      .def(
          "undo", [](PySession& self) { unlocked([&] { self.session->undo(); }); },
          "Gives the model back every byte that it had when the session began. What other sessions and packs wrote "
          "since stays.")
      .def(
          "pack", [](const PySession& self) { return unlocked([&] { return self.session->pack(); }); },
          "The change so far.")
      .def(
          "save_pack",
          [](const PySession& self, const std::filesystem::path& path) {
            unlocked([&] { self.session->save_pack(path); });
          },
          py::arg("path"), "The same as a file.")
      .def(
          "save",
          [](PySession& self, const std::filesystem::path& path, const std::string& form) {
            unlocked([&] { self.session->save(form, path); });
          },
          py::arg("path"), py::arg("form") = "pack",
          "Writes the change so far: as a pack, as an adapter (peft: a folder; lora: GGUF), or with the model as it "
          "was loaded (model: a folder; gguf). What set_weight changed is no part of it; Model.save has that.")
      .def(
          "verdicts",
          [](const PySession& self) { return to_python(unlocked([&] { return self.session->verdicts(); })); },
          "Asks the model about every fact so far: dictionaries with case_id, prompt, target, verdict (said, not_said "
          "or failed), reason and the text that it writes.")
      .def(
          "prefix",
          [](const PySession& self, const std::string& prompt) {
            return unlocked([&] { return self.session->front()(prompt); });
          },
          py::arg("prompt"),
          "What an editor that speaks through the prompt (IKE) puts in front of it, as generate(prefix(p) + p); else "
          "an empty text.")
      .def(
          "asked",
          [](const PySession& self, const py::object& facts) {
            auto set = facts_of(facts);
            set.fingerprint.clear();  // prompts with another text in front are others
            set = unlocked([&] { return self.session->asked(std::move(set)); });
            set.fingerprint = datasets::fingerprint_of(set);
            return set;
          },
          py::arg("facts"), "The facts with prefix() in front of their own prompts, as a FactSet.")
      .def("__repr__",
           [](const PySession& self) {
             return "<emend.Session " + self.session->editor().name() + ": " + counted(facts_in(self), "fact") +
                    " edited, " + std::to_string(self.session->failed()) + " failed>";
           })
      .def_property_readonly(
          "failed", [](const PySession& self) { return self.session->failed(); }, "facts that could not be edited")
      .def_property_readonly(
          "hparams", [](const PySession& self) { return to_python(self.session->editor().hparams()); },
          "effective hyper-parameters")
      .def_property_readonly("model", [](const PySession& self) { return self.model; });
  py::class_<PyRun>(module, "Run", collected<PyRun>(),
                    "A run that came to its end. Edits beside the weights are in force as long as it lives.")
      .def_property_readonly(
          "results", [](const PyRun& self) { return to_python(self.run->results()); }, "results.json, as a dictionary")
      .def_property_readonly(
          "summary", [](const PyRun& self) { return self.run->summary(); }, "the same for people")
      .def_property_readonly(
          "cases", [](const PyRun& self) { return to_python(nlohmann::json(self.run->cases())); },
          "one dictionary a fact, as in cases.jsonl: verdict (said, not_said or failed), reason, metrics")
      .def_property_readonly(
          "folder", [](const PyRun& self) { return self.run->record().out; }, "the run folder, with report.html")
      .def_property_readonly(
          "failed", [](const PyRun& self) { return self.run->record().count(workflow::Verdict::kFailed); },
          "facts that could not be edited")
      .def(
          "undo", [](PyRun& self) { unlocked([&] { self.run->session().undo(); }); },
          "Gives the model back every byte that it had when the run began, as Session.undo.")
      .def("__repr__", [](const PyRun& self) {
        const auto& record = self.run->record();
        return "<emend.Run " + record.editor + ": " + counted(record.verdicts.size(), "fact") + ", " +
               std::to_string(record.count(workflow::Verdict::kSaid)) + " said, in " + record.out + ">";
      });
  module.def("run", &run, py::arg("model").none(false), py::arg("facts"), py::arg("editor") = "", py::kw_only(),
             py::arg("out") = py::none(), py::arg("resume") = false, py::arg("hparams") = py::none(),
             py::arg("overrides") = py::none(), py::arg("corpus") = "", py::arg("statistics_tokens") = 0,
             py::arg("cache") = "", py::arg("seed") = 0, py::arg("engine") = "fast", py::arg("compute_dtype") = "",
             py::arg("batch_size") = 0, py::arg("metrics") = std::vector<std::string>{"auto"},
             py::arg("eval_at") = std::vector<std::string>{"end"}, py::arg("protocol") = "sequential",
             py::arg("on_collapse") = "warn", py::arg("save") = std::vector<std::string>{"pack"},
             py::arg("allow_conflicts") = false, py::arg("progress") = true, py::arg("free_style") = "plain",
             py::arg("health_data") = "",
             "Judges, edits batch by batch under the collapse guard, judges again, saves and reports: what memit_edit "
             "does.\nout: run folder; None makes a new one in runs/. resume: go on with an interrupted run there.\n"
             "save: what to write; an empty list, as [\"none\"]: nothing.\n"
             "The other arguments are those of Session and of memit_edit.");
  module.def("editors", &list_editors, "Name, summary and paper of every editor.");
}

}  // namespace

void bind_editing(py::module_& module) {
  // Known by its name before signatures speak of it.
  py::class_<editors::EditPack> pack(module, "Pack", "The change alone, with the model that it belongs to.");
  bind_sessions(module);
  pack.def_readonly("base_fingerprint", &editors::EditPack::base_fingerprint)
      .def_readonly("editor", &editors::EditPack::editor)
      .def_property_readonly("hparams", [](const editors::EditPack& pack) { return to_python(pack.hparams); })
      .def_property_readonly("facts", [](const editors::EditPack& pack) { return to_python(pack.facts); })
      .def("deltas", &deltas, "The change of every weight, float64, as [outputs, inputs].")
      .def(
          "save",
          [](const editors::EditPack& pack, const std::filesystem::path& path) {
            const auto folder = path.empty() ? path : std::filesystem::absolute(path).parent_path();
            if (path.empty() || std::filesystem::exists(folder / "config.json")) models::require_apart(path, folder);
            unlocked([&] { workflow::write_pack(path, pack, {}); });
          },
          py::arg("path"))
      .def("__repr__", [](const editors::EditPack& pack) {
        return "<emend.Pack of " + pack.editor + ": " + counted(pack.facts.size(), "fact") + ", " +
               counted(pack.deltas.size(), "weight") + ", " + counted(pack.runtime.size(), "part") + " beside them>";
      });
  module.def(
      "load_pack",
      [](const std::filesystem::path& path) {
        const PlainTensors plain;
        return unlocked([&] { return editors::load_pack(path); });
      },
      py::arg("path"), "Reads a pack; anything that is not a whole, unaltered pack is refused.");
  py::class_<Applied>(
      module, "Applied",
      "A pack in a model. At the end of a `with` block it is taken out again; without one it stays until "
      "revert(), also where nobody holds this object.")
      .def("revert", &Applied::revert,
           "Takes the pack out, and nothing else: without later edits every byte comes back; those stay.")
      .def("prefix", &Applied::prefix, py::arg("prompt"),
           "What a pack that speaks through the prompt (IKE) puts in front of it, as generate(prefix(p) + p); else an "
           "empty text.")
      .def_property_readonly("changed", &Applied::changed, "names of the changed weights")
      .def(
          "__enter__", [](Applied& self) -> Applied& { return self; }, py::return_value_policy::reference_internal)
      .def("__exit__", [](Applied& self, const py::object&, const py::object&, const py::object&) { self.revert(); });
  module.def("apply_pack", &apply_pack, py::arg("model").none(false), py::arg("pack"), py::arg("force") = false,
             py::arg("accept_base") = std::vector<std::string>{},
             "Writes a pack (or the file of one) into the model it was made from; force=True into another one of the "
             "same shape, accept_base into the same model in another form: the fingerprints of packs' bases to accept, "
             "8 digits or more of each. What lies beside the weights (GRACE) is in force until revert() or the model's "
             "end; what speaks through the prompt (IKE) acts by Applied.prefix alone.");
}

}  // namespace emend::python
