#include <emend/core/json.h>
#include <emend/editors/detail/ledger_state.h>

#include <set>

namespace emend::editors::detail {
namespace {

constexpr int kLedgerVersion = 1;
constexpr size_t kIdDigits = 12;

bool is_id(const std::string& id) {
  return id.size() == kIdDigits && id.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// Ids become file names, so nothing else than an id may pass for one.
std::vector<std::string> read_ids(const nlohmann::json& list, const StoredState& state) {
  const auto ids = list.get<std::vector<std::string>>();
  std::set<std::string> seen;
  for (const auto& id : ids)
    if (!state.known.contains(id) || !seen.insert(id).second)
      throw std::runtime_error("\"" + id + "\" is unknown or there twice");
  return ids;
}

}  // namespace

StoredState read_state(const std::filesystem::path& path) {
  try {
    const auto json = read_json(path, {.expected = "the file that emend wrote",
                                       .advice = "restore the folder from its source and apply the packs again"});
    if (json.at("version").get<int>() > kLedgerVersion)
      throw Error(ErrorClass::kUnsupported,
                  {path.string(), "version " + json.at("version").dump(), "version 1", "use a newer emend"});
    StoredState state;
    state.base = json.at("base").get<std::string>();
    for (const auto& [id, entry] : json.at("packs").items()) {
      if (!is_id(id)) throw std::runtime_error("\"" + id + "\" is no id");
      state.known[id] = {id,
                         false,
                         entry.at("editor").get<std::string>(),
                         entry.at("facts").get<int64_t>(),
                         entry.at("subjects").get<std::vector<std::string>>(),
                         entry.at("weights").get<std::vector<std::string>>(),
                         entry.at("applied_at").get<std::string>(),
                         entry.value("runtime", false),
                         entry.value("survived", 1.0),
                         entry.value("under", std::vector<std::string>())};
    }
    state.active = read_ids(json.at("active"), state);
    if (json.contains("pending")) state.pending = read_ids(json.at("pending"), state);
    return state;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), std::string("a damaged ledger (") + error.what() + ")", "the file that emend wrote",
                 "restore the folder from its source and apply the packs again"});
  }
}

std::string StoredState::text() const {
  nlohmann::json packs = nlohmann::json::object();
  for (const auto& [id, entry] : known) {
    packs[id] = {{"editor", entry.editor},    {"facts", entry.facts},           {"subjects", entry.subjects},
                 {"weights", entry.weights},  {"applied_at", entry.applied_at}, {"runtime", entry.runtime},
                 {"survived", entry.survived}};
    if (!entry.under.empty()) packs[id]["under"] = entry.under;
  }
  nlohmann::json state = {{"version", kLedgerVersion}, {"base", base}, {"active", active}, {"packs", packs}};
  if (pending) state["pending"] = *pending;
  return state.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace emend::editors::detail
