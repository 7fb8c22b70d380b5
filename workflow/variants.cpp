#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/quality.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run.h>
#include <emend/workflow/variants.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <set>

namespace emend::workflow {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Variant, name, group, folder, editor, hparams, set, seed)

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kVariants = "variants.json";  // its presence says that a folder is a comparison's
constexpr const char* kFailure = "failure.json";

[[noreturn]] void refuse_variant(const std::string& text, const std::string& got, const std::string& advice = "") {
  refuse({setting("editors", "\"" + shorten(text) + "\""), got,
          "EDITOR or \"EDITOR: KEY=VALUE …\", with commas between several", advice});
}

// The parts between characters of `separators`, where these do not stand in brackets.
std::vector<std::string> split_outside(const std::string& text, const std::string& separators) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth <= 0 && separators.find(c) != std::string::npos)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

std::vector<std::string> words_outside(const std::string& text) {
  auto words = split_outside(text, " \t");
  std::erase(words, "");
  return words;
}

void add_setting(Variant& variant, const std::string& word, const std::string& text) {
  const size_t equals = word.find('=');
  if (equals == std::string::npos || equals == 0) refuse_variant(text, "\"" + word + "\" is no setting");
  if (word.starts_with("hparams="))
    variant.hparams = word.substr(equals + 1);
  else
    variant.set.push_back(word);
}

// "EDITOR: …"; a piece behind a comma that is a setting goes with what stands before it.
std::vector<Variant> parse_pieces(const std::string& text) {
  std::vector<Variant> variants;
  for (const auto& piece : split_outside(text, ",")) {
    if (words_outside(piece).empty()) refuse_variant(text, "an empty item between commas");
    const size_t colon = piece.find(':'), equals = piece.find('=');
    const bool goes_on = equals < colon && !variants.empty();
    if (!goes_on) {
      const auto words = words_outside(piece.substr(0, colon));
      if (words.size() != 1) refuse_variant(piece, words.empty() ? "no editor" : "more than one word before a colon");
      variants.emplace_back().editor = editors::find_editor(words[0]).name;
    }
    const size_t from = goes_on ? 0 : colon == std::string::npos ? piece.size() : colon + 1;
    for (const auto& word : words_outside(piece.substr(from))) add_setting(variants.back(), word, piece);
  }
  return variants;
}

std::string name_of(const Variant& variant) {
  std::string settings = variant.hparams.empty() ? "" : "hparams=" + variant.hparams;
  for (const auto& assignment : variant.set) append_item(settings, assignment);
  return variant.editor + (settings.empty() ? "" : ": " + settings);
}

// A name for a file: short, and of characters that need no quotes; what that leaves equal is told apart by a hash.
std::string folder_of(const std::string& name, const std::vector<Variant>& others) {
  constexpr size_t kLongest = 80;
  std::string folder;
  for (const char c : name) {
    const bool plain =
        std::isalnum(static_cast<unsigned char>(c)) || std::string_view("._=+").find(c) != std::string::npos;
    if (plain || !folder.ends_with('-')) folder += plain ? c : '-';
  }
  const bool taken = std::ranges::any_of(others, [&](const auto& one) { return one.folder == folder; });
  if (taken || folder.size() > kLongest) folder = folder.substr(0, kLongest) + "-" + sha256_hex(name).substr(0, 8);
  return folder;
}

// The variants that the folder of a comparison knows of; none if it is no such folder.
std::vector<Variant> known_variants(const fs::path& folder) {
  std::vector<Variant> variants;
  const auto path = folder / kVariants;
  if (!fs::exists(path)) return variants;
  try {
    const json document = read_json(path);
    document.at("variants").get_to(variants);
    for (const auto& one : variants)
      if (one.folder.empty() || one.folder.find('/') != std::string::npos || one.folder.starts_with('.'))
        throw Error(ErrorClass::kCorruption, {path.string(), "a folder \"" + one.folder + "\"", "one within it", ""});
  } catch (const json::exception&) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), "no list of variants", "as emend wrote it", "start anew in another folder"});
  }
  return variants;
}

// What a new comparison would mix with what is there.
void require_usable(const fs::path& folder, bool resume) {
  if (!fs::is_directory(folder)) return;
  const bool own = fs::exists(folder / kVariants);
  if (own && !resume)
    refuse({folder.string(), "the folder holds an earlier comparison", "a new folder",
            "choose another folder with " + setting("out") + ", or give " + setting("resume")});
  if (own) return;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    // What a comparison that was stopped in its first moment leaves.
    if (name == ".lock" || (name == "checkpoint" && fs::exists(entry.path() / "settings.json") && resume)) continue;
    refuse({folder.string(), "the folder holds " + name + ", which no comparison wrote", "a folder of its own",
            "choose another folder with " + setting("out")});
  }
}

// But for the seed; settings may stand in any order.
bool same_settings(const Variant& a, const Variant& b) {
  return a.editor == b.editor && a.hparams == b.hparams &&
         std::multiset(a.set.begin(), a.set.end()) == std::multiset(b.set.begin(), b.set.end());
}

// New seeds stand behind the others of their settings.
std::vector<Variant> united(std::vector<Variant> known, const std::vector<Variant>& given) {
  for (Variant variant : given) {
    auto place = known.end();
    bool there = false;
    for (auto other = known.begin(); other != known.end(); ++other) {
      if (!same_settings(*other, variant)) continue;
      there = there || other->seed == variant.seed;
      variant.group = other->group;
      place = std::next(other);
    }
    if (there) continue;
    variant.folder = folder_of(variant.name, known);
    known.insert(place, std::move(variant));
  }
  return known;
}

RunOptions options_of(const Variant& variant, const RunOptions& common) {
  RunOptions options = common;
  options.editor = variant.editor;
  if (!variant.hparams.empty()) options.hparams = variant.hparams;
  options.set.insert(options.set.end(), variant.set.begin(), variant.set.end());
  options.seed = variant.seed;
  options.out = (fs::path(common.out) / variant.folder).string();
  options.resume = fs::exists(fs::path(options.out) / "checkpoint" / "settings.json");
  return options;
}

std::vector<std::string> command_of(const Variant& variant, const RunOptions& options,
                                    std::vector<std::string> command) {
  const auto add = [&](std::string_view name, const std::string& value) {
    command.push_back(option_spelling(name));
    command.push_back(value);
  };
  add("editor", variant.editor);
  if (!options.hparams.empty()) add("hparams", options.hparams);
  for (const auto& assignment : options.set) add("set", assignment);
  add("seed", std::to_string(options.seed));
  add("out", options.out);
  return command;
}

// Everything that can be known before a model is loaded.
std::string check_all(const Comparison& comparison, const std::vector<Variant>& variants, const Handles& lent) {
  require_valid(comparison.common);
  auto facts = load_named_facts(comparison.common.facts, lent);
  const auto metrics = metric_names(comparison.common.metrics, facts, comparison.common.single());
  refuse_contradictions(facts, comparison.common);
  const auto checkpoint = models::open_checkpoint(comparison.common.model.model);
  models::require_apart(comparison.common.out, checkpoint->path());
  for (const auto& variant : variants) {
    const auto options = options_of(variant, comparison.common);
    (void)chosen_editor(options, checkpoint.get());
    check_hparams(options, *checkpoint);
    try {
      check_outputs(options, metrics);
    } catch (const Error& error) {
      if (error.error_class() != ErrorClass::kUnsupported) throw;  // of this editor alone: its row will say so
    }
  }
  return datasets::fingerprint_of(facts);
}

// What was measured before a sequence broke off.
json measured_so_far(const fs::path& folder) {
  std::optional<JsonFault> unreadable;
  const auto path = folder / "checkpoint" / "measured.json";
  if (!fs::exists(path)) return json::array();
  const auto document = parse_json(read_file(path), {}, unreadable);
  return document.is_object() ? document.value("lifelong", json::array()) : json::array();
}

void note_failure(const fs::path& folder, const Error& error) {
  std::error_code failed;
  fs::create_directories(folder, failed);
  const json document = {
      {"error", error.what()}, {"class", to_string(error.error_class())}, {"lifelong", measured_so_far(folder)}};
  write_file(folder / kFailure, dump_json(document) + "\n");
}

void run_one(const Variant& variant, const Comparison& comparison, Handles lent) {
  auto options = options_of(variant, comparison.common);
  const fs::path folder = options.out;
  lent.command_line = command_of(variant, options, comparison.command);
  const bool begun = fs::exists(folder / "checkpoint");
  bool opened = false;
  const auto failed = [&](const Error& error) {
    lent.log.warning("compare.failed", variant.name + " failed: " + error.what());
    note_failure(folder, error);
  };
  try {
    Run run(std::move(options), lent);
    opened = true;
    run.execute();
  } catch (const Error& error) {
    if (error.error_class() == ErrorClass::kCancelled)
      throw Error(ErrorClass::kCancelled,
                  {variant.name, "interrupted", "",
                   setting("out", comparison.common.out) + " with " + setting("resume") + " goes on"});
    // What was begun and cannot be gone on with as things are: nothing is wrong with the editor.
    const bool refused = begun && (!opened || error.error_class() == ErrorClass::kCorruption);
    if (error.error_class() == ErrorClass::kIo || refused) throw;
    failed(error);
  } catch (const c10::Error& error) {  // above all memory that the others may not need
    failed({ErrorClass::kDevice, {"", error.what_without_backtrace(), "", ""}});
  } catch (const std::bad_alloc&) {
    failed({ErrorClass::kDevice, {"", "the machine has no memory left", "", ""}});
  }
}

}  // namespace

std::vector<Variant> parse_variants(const std::vector<std::string>& texts, const std::vector<int64_t>& seeds,
                                    uint64_t seed) {
  std::vector<Variant> variants;
  for (const auto& text : texts)
    for (const auto& piece : parse_pieces(text))
      for (size_t s = 0; s < std::max<size_t>(1, seeds.size()); ++s) {
        Variant variant = piece;
        variant.group = variant.name = name_of(piece);
        variant.seed = seeds.empty() ? seed : static_cast<uint64_t>(seeds[s]);
        if (!seeds.empty()) variant.name += ", seed " + std::to_string(seeds[s]);
        const auto same = [&](const Variant& other) {
          return other.seed == variant.seed && same_settings(other, variant);
        };
        if (std::ranges::any_of(variants, same)) refuse_variant(variant.name, "named twice", "leave one out");
        variant.folder = folder_of(variant.name, variants);
        variants.push_back(std::move(variant));
      }
  if (variants.empty()) refuse_variant(join(texts), "no editor");
  return variants;
}

void compare_variants(Comparison comparison, Handles& lent) {
  const fs::path folder = comparison.common.out;
  require_usable(folder, comparison.common.resume);
  const auto variants = united(known_variants(folder), comparison.variants);
  comparison.settings["facts_fingerprint"] = check_all(comparison, variants, lent);

  const RunDirectory held(folder, Earlier::kAny);
  const RunCheckpoint settings(folder / "checkpoint", comparison.settings, comparison.common.resume);
  settings.keep_command(lent.command_line);
  held.write_json(kVariants, json{{"schema", 1}, {"variants", variants}});
  for (size_t i = 0; i < variants.size(); ++i) {
    const auto& variant = variants[i];
    const std::string place =
        variant.name + " (" + std::to_string(i + 1) + " of " + std::to_string(variants.size()) + ")";
    lent.cancel.check("compare");
    if (fs::exists(folder / variant.folder / "results.json") || fs::exists(folder / variant.folder / kFailure)) {
      lent.log.info("compare.skip", place + " is finished");
      continue;
    }
    lent.log.info("compare.run", place);
    run_one(variant, comparison, lent);
  }
}

json draw_comparison(const fs::path& folder) {
  std::vector<evaluation::QualityEntry> entries;
  for (const auto& variant : known_variants(folder))
    entries.push_back({variant.name, variant.group, folder / variant.folder});
  if (entries.empty() && fs::is_directory(folder)) {
    std::vector<fs::path> runs;
    for (const auto& entry : fs::directory_iterator(folder))
      if (fs::exists(entry.path() / "results.json")) runs.push_back(entry.path());
    std::ranges::sort(runs);
    for (const auto& run : runs) entries.push_back({run.filename().string(), run.filename().string(), run});
  }
  if (entries.empty())
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no comparison and no runs", "the folder of a comparison, or one with runs in it",
                 "begin one with " + setting("editors")});
  auto document = evaluation::quality_document(entries);
  write_file(folder / "quality.json", dump_json(document) + "\n");
  write_file(folder / "quality.html", evaluation::quality_page(document));
  return document;
}

}  // namespace emend::workflow
