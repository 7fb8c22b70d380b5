#include "pack_folder.h"

#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/packs/runtime.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/run_directory.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "http.h"

namespace emend::tools::serve {
namespace {

namespace fs = std::filesystem;

bool is_pack_name(const std::string& name) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_' || c == '.'; };
  return !name.empty() && name.size() <= 64 && name[0] != '.' && std::ranges::all_of(name, allowed);
}

// `held`: what is in force in the model's own folder.
void require_together(std::vector<editors::NamedPack> held, const PackSet& packs) {
  const size_t before = held.size();
  for (auto one = packs.begin(); one != packs.end(); ++one)
    if (std::any_of(packs.begin(), one, [&](const auto& other) { return other.name == one->name; }))
      refuse("packs: " + one->name + " is named twice; expected each of them once");
  for (const auto& one : packs) held.push_back({one.name, *one.pack});
  editors::require_together(held, before, false, "packs", "take one of them out of force");
}

// What could be said only while answers run.
void require_fit(const models::Model& model, const editors::EditPack& pack, const std::string& where) {
  for (const auto& part : pack.runtime) (void)editors::make_runtime(part, model, where);
  editors::require_shapes(model, pack, where);
}

}  // namespace

InForce::InForce(models::Model& model, const PackSet& packs) : PackScope(model), key(key_of(packs)) {
  for (const auto& one : packs) add(*one.pack, one.name);
}

std::string key_of(const PackSet& packs) {
  std::string key;
  for (const auto& one : packs) key += one.pack->id + "+";
  return key;
}

void require_pack_name(const std::string& name) {
  if (!is_pack_name(name))
    refuse("a pack's name has 1 to 64 letters, digits, \"-\", \"_\" or \".\", and does not begin with \".\"");
}

PackFolder::PackFolder(fs::path folder, const models::Model& model, const Log& log)
    : folder_(std::move(folder)),
      model_(model),
      fingerprint_(model.fingerprint()),
      lineage_(editors::lineage_of(model.checkpoint().path())),
      held_(editors::packs_in_force(model.checkpoint().path())) {
  for (auto& [name, pack] : held_) pack.rebase(fingerprint_);
  fs::create_directories(folder_);
  // Let go by the system when the process ends, however it ends.
  lock_ = Descriptor(::open((folder_ / ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (lock_.fd < 0 || !lock_alone(lock_.fd, folder_))
    emend::refuse({folder_.string(), "in use by another server, or not to be written", "a folder of its own",
                   "stop the other one, or name another folder"});
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().stem().string();
    if (entry.path().extension() != ".safetensors" || name.starts_with('.')) continue;
    if (is_pack_name(name))
      files.push_back(entry.path());
    else
      log.warning("serve.pack", "left out: " + entry.path().string() + " has a name that is no pack's");
  }
  std::ranges::sort(files);
  for (const auto& path : files) {
    try {
      packs_.push_back(load(path.stem().string(), path));
    } catch (const Error& error) {
      log.warning("serve.pack", std::string("left out: ") + error.what());
    }
  }
  read_state(log);
}

void PackFolder::read_state(const Log& log) {
  const fs::path path = folder_ / "state.json";
  if (!fs::exists(path)) return;
  static const auto schema = object_schema(
      R"("required":["schema","active"],"properties":{"schema":{"enum":[1]},
"active":{"type":"array","items":{"type":"string"},"uniqueItems":true},
"strengths":{"type":"object","additionalProperties":{"type":"number","minimum":-10,"maximum":10}}})");
  const std::string advice = "mend it, or take it away: no pack is in force then";
  auto state = read_json(path, {.expected = "the state of emend serve", .advice = advice});
  const auto corrupt = [&](const std::string& what, const std::string& expected) {
    throw Error(ErrorClass::kCorruption, {path.string(), what, expected, advice});
  };
  if (const auto fault = schema_fault(state, schema))
    corrupt((fault->where.empty() ? "" : fault->where + ": ") + fault->got, fault->expected);
  for (const std::string name : state["active"]) {
    if (search(name))
      active_.push_back(name);
    else
      log.warning("serve.pack", "the pack " + name + " was in force and is not here any more");
  }
  try {
    require_together(held_, collect(active_));
    for (auto& one : packs_)
      if (state.contains("strengths") && state["strengths"].contains(one.name))
        scale(one, state["strengths"][one.name]);
  } catch (const Error& error) {
    corrupt(std::string("active: ") + error.what(), "packs that go together");
  } catch (const HttpError& error) {
    corrupt(error.what(), "");
  }
}

ServedPack PackFolder::load(const std::string& name, const fs::path& path) const {
  auto pack = editors::load_pack(path);
  editors::require_base(pack, fingerprint_, {}, path.filename().string(), lineage_);
  pack.rebase(fingerprint_);
  require_fit(model_, pack, path.filename().string());
  return {name, std::make_shared<const editors::EditPack>(std::move(pack))};
}

const ServedPack* PackFolder::search(const std::string& name) const {
  const auto found = std::ranges::find_if(packs_, [&](const auto& one) { return one.name == name; });
  return found == packs_.end() ? nullptr : &*found;
}

const ServedPack& PackFolder::find(const std::string& name) const {
  if (const auto* found = search(name)) return *found;
  throw HttpError(404, shorten(name, 80) + ": there is no such pack", "pack_not_found");
}

PackSet PackFolder::collect(const std::vector<std::string>& names) const {
  PackSet set;
  for (const auto& name : names) set.push_back(find(name));
  if (held_.size() + set.size() < 2) return set;
  constexpr size_t kMostKept = 64;
  const std::string key = join(names, "/") + "/" + key_of(set);
  if (const auto kept = placed_.find(key); kept != placed_.end()) return kept->second;
  auto all = held_;
  for (const auto& one : set) all.push_back({one.name, *one.pack});
  editors::move_apart(all, editors::originals_of(model_.checkpoint()));
  for (size_t i = 0; i < set.size(); ++i)
    set[i].pack = std::make_shared<const editors::EditPack>(std::move(all[held_.size() + i].pack));
  if (placed_.size() == kMostKept) placed_.clear();
  return placed_[key] = std::move(set);
}

PackSet PackFolder::in_force() const {
  const std::lock_guard lock(mutex_);
  return collect(active_);
}

PackSet PackFolder::named(const std::vector<std::string>& names) const {
  PackSet set;
  {
    const std::lock_guard lock(mutex_);
    set = collect(names);
  }
  require_together(held_, set);
  return set;
}

nlohmann::ordered_json PackFolder::describe(const ServedPack& one) const {
  const auto place = std::ranges::find(active_, one.name);
  const bool active = place != active_.end();
  std::error_code gone;
  return {{"name", one.name},
          {"id", one.pack->id},
          {"active", active},
          {"position", active ? nlohmann::ordered_json(place - active_.begin()) : nlohmann::ordered_json()},
          {"editor", one.pack->editor},
          {"facts", one.pack->facts},
          {"strength",
           one.pack->extra.contains("directions") ? nlohmann::ordered_json(one.strength) : nlohmann::ordered_json()},
          {"beside", !one.pack->runtime.empty()},
          {"bytes", fs::file_size(file(one.name), gone)}};
}

nlohmann::ordered_json PackFolder::list() const {
  const std::lock_guard lock(mutex_);
  auto list = nlohmann::ordered_json::array();
  for (const auto& one : packs_) list.push_back(describe(one));
  return {{"object", "list"}, {"data", list}, {"active", active_}};
}

nlohmann::ordered_json PackFolder::describe(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return describe(find(name));
}

std::vector<std::string> PackFolder::names() const {
  const std::lock_guard lock(mutex_);
  return mapped(packs_, [](const auto& one) { return one.name; });
}

bool PackFolder::taken(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return search(name) || fs::exists(fs::symlink_status(file(name)));
}

void PackFolder::add(const std::string& name, const fs::path& from) {
  require_pack_name(name);
  auto loaded = load(name, from);
  if (taken(name)) throw HttpError(409, "there is a pack or a file of this name", "pack_exists");
  const std::lock_guard lock(mutex_);
  fs::rename(from, file(name));
  packs_.push_back(std::move(loaded));
}

void PackFolder::scale(ServedPack& one, double strength) const {
  if (!one.pack->extra.contains("directions"))
    refuse("strength: " + one.name + " is no pack of directions; expected one that emend direct wrote");
  if (!(std::abs(strength) <= 10)) refuse("strength: expected a number from -10 to 10");
  if (!one.whole) one.whole = one.pack;
  auto scaled = *one.whole;
  for (auto& delta : scaled.deltas) {
    auto& factor = delta.low_rank() ? delta.left_DR : delta.dense_DF;
    factor = factor * strength;
  }
  for (auto& part : scaled.runtime)
    if (part.kind == editors::kSteerKind) part.values["strength"] = strength * part.values["strength"].get<double>();
  if (auto& own = scaled.hparams; own.contains("strength") && own["strength"].is_number())
    own["strength"] = strength * own["strength"].get<double>();
  if (strength != 1) scaled.id += "@" + nlohmann::json(strength).dump();  // to the last digit
  one.pack = std::make_shared<const editors::EditPack>(std::move(scaled));
  one.strength = strength;
}

void PackFolder::change(const std::string& name, const Change& change) {
  const std::lock_guard lock(mutex_);
  ServedPack changed = find(name);
  if (change.strength) scale(changed, *change.strength);
  auto wanted = active_;
  if (change.active) {
    const auto place = std::ranges::find(wanted, name);
    const auto before = static_cast<size_t>(place - wanted.begin());
    std::erase(wanted, name);
    if (*change.active)
      wanted.insert(wanted.begin() + static_cast<long>(std::min(change.position.value_or(before), wanted.size())),
                    name);
  }
  if (wanted != active_) try {
      require_together(held_, collect(wanted));
    } catch (const Error& error) {
      throw HttpError(409, error.what(), "packs_conflict");
    }
  else if (!change.strength)
    return;
  ServedPack& one = *std::ranges::find(packs_, name, &ServedPack::name);
  std::swap(one, changed);
  try {
    keep(std::move(wanted));
  } catch (...) {
    std::swap(one, changed);
    throw;
  }
}

void PackFolder::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const ServedPack gone = find(name);
  auto wanted = active_;
  std::erase(wanted, name);
  std::erase_if(packs_, [&](const ServedPack& one) { return one.name == name; });
  try {
    keep(std::move(wanted));  // also without its strength
    fs::remove(file(name));
  } catch (...) {
    packs_.push_back(gone);
    throw;
  }
}

void PackFolder::keep(std::vector<std::string> active) {
  auto strengths = nlohmann::ordered_json::object();
  for (const auto& one : packs_)
    if (one.strength != 1) strengths[one.name] = one.strength;
  write_file(folder_ / "state.json",
             workflow::dump_json({{"schema", 1}, {"active", active}, {"strengths", strengths}}) + "\n");
  active_ = std::move(active);
}

}  // namespace emend::tools::serve
