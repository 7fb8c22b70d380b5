#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/schema.h>

#include <algorithm>

namespace emend::hparams::detail {

namespace {

const ErasedField* find_field(const std::vector<ErasedField>& fields, std::string_view key) {
  for (const ErasedField& field : fields) {
    const auto& aliases = field.info.options.aliases;
    if (field.info.name == key || std::find(aliases.begin(), aliases.end(), key) != aliases.end()) return &field;
  }
  return nullptr;
}

[[noreturn]] void refuse_unknown(const ErasedSchema& schema, const RawEntry& entry) {
  std::vector<std::string> names;
  for (const ErasedField& field : schema.fields) {
    names.push_back(field.info.name);
    names.insert(names.end(), field.info.options.aliases.begin(), field.info.options.aliases.end());
  }
  const std::string closest = closest_name(entry.key, names);
  const std::string list = join(schema.fields, ", ", [](const ErasedField& field) { return field.info.name; });
  refuse(
      {entry.where, "unknown field \"" + entry.key + "\"",
       closest.empty() ? "a hyper-parameter of " + schema.editor + " (" + list + ")"
                       : "a hyper-parameter of " + schema.editor,
       closest.empty() ? "remove it, or check that the file is for this editor" : "did you mean \"" + closest + "\"?"});
}

[[noreturn]] void refuse_value(const ErasedField& field, const RawEntry& entry, const std::string& expected) {
  std::string advice;
  const auto& one_of = field.info.options.one_of;
  if (entry.value.kind == RawValue::Kind::kScalar) advice = did_you_mean(entry.value.text, one_of);
  if (advice.empty() && !field.info.options.meaning.empty())
    advice = field.info.name + ": " + field.info.options.meaning;
  refuse({entry.where, entry.key + " is " + entry.value.show(), expected, advice});
}

/// The one warning about keys that have no effect on the edit.
void warn_ignored(const ErasedSchema& schema, const RawHparams& raw, const std::vector<std::string>& unused,
                  const Log& log) {
  const MachineSettings machine = machine_settings(raw);
  nlohmann::json fields = {{"source", raw.source()}, {"notes", nlohmann::json::array()}};
  std::string text;
  const auto note = [&](const std::string& line) {
    append_item(text, line, "; ");
    fields["notes"].push_back(line);
  };
  for (const std::string& line : machine.notes) {
    const std::string key = line.substr(0, line.find(':'));
    if (!find_field(schema.fields, key)) note(line);
  }
  for (const std::string& line : unused) note(line);
  if (text.empty()) return;
  const std::string source = raw.source().empty() ? std::string("hyper-parameters") : raw.source();
  log.event(LogLevel::kWarning, "hparams.ignored", source + ": keys that do not describe the edit: " + text, fields);
}

}  // namespace

void ErasedSchema::add(ErasedField field, void* defaults) {
  EMEND_CHECK(find_field(fields, field.info.name) == nullptr, "hyper-parameter declared twice: " + field.info.name);
  field.info.default_text = field.write(field.place(defaults)).dump();
  fields.push_back(std::move(field));
}

void ErasedSchema::include(const ErasedSchema& other, const std::function<void*(void*)>& part, void* defaults) {
  for (ErasedField field : other.fields) {
    field.place = [place = std::move(field.place), part](void* object) { return place(part(object)); };
    add(std::move(field), defaults);
  }
  for (const ErasedCheck& check : other.checks)
    checks.push_back({check.field, [test = check.test, part](void* object) { return test(part(object)); }});
  unused.insert(unused.end(), other.unused.begin(), other.unused.end());
}

void ErasedSchema::parse(void* object, const RawHparams& raw, const Log& log) const {
  std::vector<const ErasedField*> given;
  std::vector<std::string> ignored;
  for (const RawEntry& entry : raw.entries()) {
    if (const ErasedField* field = find_field(fields, entry.key)) {
      const bool again = std::find(given.begin(), given.end(), field) != given.end();
      if (again && entry.value.line != 0)  // in a file; a setting replaces what was given under any name
        refuse({entry.where, entry.key + " is another name for " + field->info.name + ", which is given too",
                "one of them", "remove one"});
      if (!again) given.push_back(field);
      if (const std::string expected = field->read(entry.value, field->info.options, field->place(object));
          !expected.empty())
        refuse_value(*field, entry, expected);
      continue;
    }
    const auto known = std::ranges::find(unused, entry.key, [](const auto& pair) { return pair.first; });
    if (known != unused.end()) {
      ignored.push_back(entry.key + ": " + known->second);
    } else if (entry.key != "preset" && !is_machine_key(entry.key)) {
      refuse_unknown(*this, entry);
    }
  }
  for (const ErasedField& field : fields)
    if (field.info.options.required && std::find(given.begin(), given.end(), &field) == given.end())
      refuse({raw.source().empty() ? "hyper-parameters" : raw.source(), field.info.name + " is missing",
              field.info.type + ": " + field.info.options.meaning,
              "add it to the file or give " + setting("set", field.info.name + "=…")});
  for (const ErasedCheck& check : checks)
    if (const std::string expected = check.test(object); !expected.empty()) {
      const RawEntry* entry = raw.find(check.field);
      refuse({raw.where(check.field), check.field + (entry ? " is " + entry->value.show() : " is left at its default"),
              expected, ""});
    }
  warn_ignored(*this, raw, ignored, log);
}

nlohmann::json ErasedSchema::dump(const void* object) const {
  nlohmann::json result = nlohmann::json::object();
  for (const ErasedField& field : fields)  // `place` only moves the pointer; the object stays untouched
    result[field.info.name] = field.write(field.place(const_cast<void*>(object)));
  return result;
}

}  // namespace emend::hparams::detail
