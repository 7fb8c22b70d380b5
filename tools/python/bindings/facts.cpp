#include <emend/core/text.h>

#include <set>

#include "bindings.h"

namespace emend::datasets {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hop, question, cloze, answers)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FactGroup, case_id, kind, facts, sequential, questions, answers, new_answers,
                                   single_hops, new_single_hops, extra, line)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BadRow, line, text, where)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UnreadKey, key, meant, where, times, kept)
// Without the facts.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FactSet, groups, format, path, fingerprint, rows, skipped, bad_rows, unread, choices)
}  // namespace emend::datasets

namespace emend::python {
namespace {

using datasets::Fact;
using datasets::FactSet;

using Texts = std::vector<std::string>;

void append(Texts& texts, const Texts& more) {
  texts.insert(texts.end(), more.begin(), more.end());
}

// Rows of the caller's, read as those of a file are.
FactSet parsed(const nlohmann::json& rows, const std::string& where, const Log& log) {
  try {
    return datasets::parse_fact_rows(rows, where, {}, log);
  } catch (const Error& error) {  // no file is damaged
    if (error.error_class() != ErrorClass::kCorruption) throw;
    throw Error(ErrorClass::kInvalidArgument, parts_of(error));
  }
}

// Probes as to_dict has them, {"one_hop": [{"prompt": …, "answers": […]}]}, read as those of a file are.
void read_probes(Fact& fact, const py::object& locality, const py::object& portability) {
  nlohmann::json row = {{"prompt", fact.prompt}, {"subject", fact.subject}, {"target_new", fact.target_new}};
  if (!locality.is_none()) row["locality"] = to_json(locality, "locality");
  if (!portability.is_none()) row["portability"] = to_json(portability, "portability");
  if (row.size() == 3) return;
  auto read = parsed(nlohmann::json::array({std::move(row)}), "Fact", {}).facts.at(0);
  fact.locality = std::move(read.locality);
  fact.portability = std::move(read.portability);
}

Fact make_fact(const std::string& prompt, const std::string& subject, const std::string& target_new,
               const std::optional<std::string>& target_true, const Texts& paraphrases, const Texts& neighbourhood,
               int64_t case_id, const Texts& target_true_aliases, const std::string& relation_id,
               const Texts& paraphrase_prompts, const Texts& neighborhood_prompts, const Texts& attribute_prompts,
               const Texts& generation_prompts, const Texts& distracting_neighborhood_prompts,
               const py::object& locality, const py::object& portability, const py::object& extra) {
  Fact fact;
  fact.prompt = prompt;
  fact.subject = trimmed(subject);  // as files are read
  fact.target_new = trimmed(target_new);
  if (target_true) fact.target_true = trimmed(*target_true);
  fact.target_true_aliases = target_true_aliases;
  fact.relation_id = relation_id;
  for (const Texts* texts : {&paraphrases, &paraphrase_prompts}) append(fact.paraphrase_prompts, *texts);
  for (const Texts* texts : {&neighbourhood, &neighborhood_prompts}) append(fact.neighborhood_prompts, *texts);
  fact.attribute_prompts = attribute_prompts;
  fact.generation_prompts = generation_prompts;
  fact.distracting_prompts = distracting_neighborhood_prompts;
  fact.case_id = case_id;
  if (!extra.is_none()) fact.extra = to_json(extra, "extra");
  if (!fact.extra.is_object()) throw unexpected("extra", extra, "a dict");
  datasets::validate(fact);
  read_probes(fact, locality, portability);
  return fact;
}

FactSet load_facts(const std::filesystem::path& path, const std::string& format, int64_t limit, int64_t offset) {
  return unlocked(
      [&] { return datasets::load_facts(path, {.format = format, .offset = offset, .limit = limit}, warnings()); });
}

// For pickle and copy: what to_dict gives, and where the fact was read.
py::tuple state_of(const Fact& fact) {
  return py::make_tuple(to_python(datasets::to_json(fact)), fact.source, fact.line, fact.row);
}

Fact fact_from(const py::tuple& state) {
  auto fact = py::type::of<Fact>()(**py::dict(state[0])).cast<Fact>();
  fact.source = state[1].cast<std::string>();
  fact.line = state[2].cast<int64_t>();
  fact.row = state[3].cast<int64_t>();
  return fact;
}

// The facts, and the rest as plain data.
py::tuple state_of_set(const FactSet& set) {
  return py::make_tuple(set.facts, to_python(set));
}

FactSet set_from(const py::tuple& state) {
  auto set = to_json(state[1], "FactSet").get<FactSet>();
  set.facts = state[0].cast<std::vector<Fact>>();
  return set;
}

// Rows as any of the readers takes them.
FactSet from_rows(const py::list& rows) {
  auto list = nlohmann::json::array();
  for (const auto& row : rows) {
    list.push_back(py::isinstance<Fact>(row) ? datasets::to_json(row.cast<const Fact&>()) : to_json(row, "facts"));
    auto& one = list.back();
    if (py::isinstance<Fact>(row) && one["case_id"] < 0) one.erase("case_id");             // it gets a free one
    if (const auto extra = one.find("extra"); extra != one.end() && extra->is_object()) {  // of to_dict
      const nlohmann::json kept = *extra;
      one.erase(extra);
      for (const auto& [key, value] : kept.items()) one.emplace(key, value);
    }
    if (!py::isinstance<Fact>(row) && one.contains("prompt") && one.contains("target_new"))  // as emend.Fact calls them
      for (const auto& [own, key] :
           {std::pair("paraphrases", "paraphrase_prompts"), {"neighbourhood", "neighborhood_prompts"}})
        if (const auto given = one.find(own); given != one.end() && !one.contains(key)) {
          one[key] = *given;
          one.erase(own);
        }
  }
  return parsed(list, "facts", warnings());
}

}  // namespace

static FactSet any_facts_of(const py::object& facts) {
  if (py::isinstance<FactSet>(facts)) return facts.cast<FactSet>();
  if (py::isinstance<Fact>(facts) || py::isinstance<py::dict>(facts)) {
    py::list one;
    one.append(facts);
    return any_facts_of(one);
  }
  if (py::isinstance<py::str>(facts) || py::hasattr(facts, "__fspath__"))
    return load_facts(path_text(facts, "facts"), "auto", -1, 0);
  static const std::string expected = "a path, a FactSet, a Fact, a dict, or a list of Fact and dict";
  if (PyBytes_Check(facts.ptr()) || !py::isinstance<py::iterable>(facts)) throw unexpected("facts", facts, expected);
  const py::list rows(facts);
  bool dicts = false;
  for (const auto& row : rows) {
    if (!py::isinstance<Fact>(row) && !py::isinstance<py::dict>(row)) throw unexpected("facts", row, expected);
    dicts = dicts || py::isinstance<py::dict>(row);
  }
  if (dicts) return from_rows(rows);
  FactSet set;
  set.format = "python";
  for (const auto& row : rows) set.facts.push_back(row.cast<Fact>());
  // Each its own number: those that are given once stay, the others get free ones.
  std::set<int64_t> taken;
  std::vector<Fact*> others;
  for (auto& fact : set.facts)
    if (fact.case_id < 0 || !taken.insert(fact.case_id).second) others.push_back(&fact);
  int64_t next = 0;
  for (Fact* fact : others) {
    while (!taken.insert(next).second) ++next;
    fact->case_id = next;
  }
  set.fingerprint = datasets::fingerprint(set.facts);
  return set;
}

FactSet facts_of(const py::object& facts) {
  auto set = any_facts_of(facts);
  if (set.facts.empty()) refuse({"facts", "no facts to work on", "at least one", ""});
  return set;
}

void bind_facts(py::module_& module) {
  py::class_<Fact>(module, "Fact",
                   "One change: after `prompt` with the subject filled in, the model shall say the target.")
      .def(py::init(&make_fact), py::arg("prompt"), py::arg("subject"), py::arg("target_new"), py::kw_only(),
           py::arg("target_true") = py::none(), py::arg("paraphrases") = Texts{}, py::arg("neighbourhood") = Texts{},
           py::arg("case_id") = -1, py::arg("target_true_aliases") = Texts{}, py::arg("relation_id") = "",
           py::arg("paraphrase_prompts") = Texts{}, py::arg("neighborhood_prompts") = Texts{},
           py::arg("attribute_prompts") = Texts{}, py::arg("generation_prompts") = Texts{},
           py::arg("distracting_neighborhood_prompts") = Texts{}, py::arg("locality") = py::none(),
           py::arg("portability") = py::none(), py::arg("extra") = py::none(),
           "Takes the members of to_dict() under their names there too, so that a fact comes back from its dictionary. "
           "paraphrase_prompts and neighborhood_prompts join paraphrases and neighbourhood.")
      .def_readonly("prompt", &Fact::prompt, "with exactly one \"{}\", the place of the subject")
      .def_readonly("subject", &Fact::subject)
      .def_readonly("target_new", &Fact::target_new)
      .def_readonly("target_true", &Fact::target_true)
      .def_readonly("paraphrases", &Fact::paraphrase_prompts)
      .def_readonly("neighbourhood", &Fact::neighborhood_prompts)
      .def_readonly("case_id", &Fact::case_id)
      .def_property_readonly("full_prompt", &Fact::full_prompt)
      .def(
          "to_dict", [](const Fact& fact) { return to_python(datasets::to_json(fact)); },
          "The fact as a dictionary, without what is empty.")
      .def(
          "__eq__", [](const Fact& a, const Fact& b) { return datasets::to_json(a) == datasets::to_json(b); },
          py::is_operator())
      .def("__hash__",
           [](const Fact& fact) { return py::hash(py::make_tuple(fact.prompt, fact.subject, fact.target_new)); })
      .def(py::pickle(&state_of, &fact_from))
      .def("__repr__",
           [](const Fact& fact) { return "Fact(" + fact.full_prompt() + " \xE2\x86\x92 " + fact.target_new + ")"; });
  py::class_<FactSet>(module, "FactSet", "Facts of one file.")
      .def_readonly("format", &FactSet::format)
      .def_readonly("fingerprint", &FactSet::fingerprint)
      .def_property_readonly(
          "skipped", [](const FactSet& set) { return set.skipped.size(); }, "rows without a target, left out")
      .def_readonly("facts", &FactSet::facts)
      .def("__len__", [](const FactSet& set) { return set.facts.size(); })
      .def(
          "__iter__",
          [](const FactSet& set) {
            return py::make_iterator<py::return_value_policy::copy>(set.facts.begin(), set.facts.end());
          },
          py::keep_alive<0, 1>())
      .def(
          "__getitem__",
          [](const FactSet& set, int64_t index) {
            const auto size = static_cast<int64_t>(set.facts.size());
            if (index < -size || index >= size)
              throw py::index_error("facts[" + std::to_string(index) + "]: there are " +
                                    counted(set.facts.size(), "fact"));
            return set.facts[static_cast<size_t>(index < 0 ? index + size : index)];
          },
          py::arg("index"))
      .def(
          "__getitem__",
          [](const FactSet& set, const py::slice& range) {
            size_t start = 0, stop = 0, step = 0, length = 0;
            if (!range.compute(set.facts.size(), &start, &stop, &step, &length)) throw py::error_already_set();
            std::vector<Fact> facts;
            for (size_t i = 0; i < length; ++i, start += step) facts.push_back(set.facts[start]);
            return facts;
          },
          py::arg("range"))
      .def(py::pickle(&state_of_set, &set_from))
      .def(
          "__eq__", [](const FactSet& a, const FactSet& b) { return a.fingerprint == b.fingerprint; },
          py::is_operator())
      .def("__hash__", [](const FactSet& set) { return py::hash(py::str(set.fingerprint)); })
      .def("__repr__", [](const FactSet& set) {
        return "<emend.FactSet of " + counted(set.facts.size(), "fact") + ", " + set.format + ">";
      });
  module.def("load_facts", &load_facts, py::arg("path"), py::kw_only(), py::arg("format") = "auto",
             py::arg("limit") = -1, py::arg("offset") = 0,
             "Reads a facts file of any known format: CounterFact, zsRE, EasyEdit, KnowEdit, MQuAKE, ConflictEdit, "
             "FastEdit, JSON lines, CSV. Warns of rows without a target, which are left out.");
}

}  // namespace emend::python
