#include <emend/editors/steps/lookalikes.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <sstream>

namespace emend::editors {
namespace {

constexpr const char* kLists =
    "Names of one kind: Marie Curie, Pierre Curie, Albert Einstein, Niels Bohr, Lise Meitner\n"
    "Names of one kind: Lake Michigan, Lake Superior, Lake Huron, Lake Erie, Lake Ontario\n"
    "Names of one kind: Boeing 747, Boeing 737, Boeing 767, Boeing 707, Boeing 777\n"
    "Names of one kind: ";

}  // namespace

std::vector<std::string> names_of(const std::string& list, const std::string& subject) {
  std::vector<std::string> names;
  std::istringstream items(list);
  for (std::string name; std::getline(items, name, ',') && !items.eof();) {  // the last one may be cut off
    name.erase(0, std::min(name.size(), name.find_first_not_of(' ')));
    const bool plain = !name.empty() && name.find_first_of("{}\n") == std::string::npos;
    if (plain && name.find(subject) == std::string::npos && std::ranges::find(names, name) == names.end())
      names.push_back(name);
  }
  return names;
}

std::vector<std::vector<std::string>> lookalikes(const models::Model& model, std::span<const std::string> subjects,
                                                 const LookalikeOptions& options) {
  constexpr size_t kSubjectsAtOnce = 16;
  std::vector<std::vector<std::string>> all(subjects.size());
  if (options.count == 0) return all;
  const auto& tokenizer = model.tokenizer();
  models::GenerateOptions writing;
  writing.max_new_tokens = 32;
  writing.temperature = 0.8;
  writing.top_k = 40;
  writing.cancel = options.cancel;
  writing.stop_ids = tokenizer.eos_ids();
  const auto line = tokenizer.encode_ids("\n", false);
  writing.stop_ids.insert(writing.stop_ids.end(), line.begin(), line.end());
  for (size_t begin = 0; begin < subjects.size(); begin += kSubjectsAtOnce) {
    writing.seed = options.seed + begin;
    std::vector<std::vector<int64_t>> rows;
    std::vector<size_t> asked;
    for (size_t s = begin; s < std::min(subjects.size(), begin + kSubjectsAtOnce); ++s) {
      const auto ids = tokenizer.encode_ids(kLists + subjects[s] + ",");
      if (std::ssize(ids) + writing.max_new_tokens > model.max_positions()) continue;
      rows.insert(rows.end(), static_cast<size_t>(options.samples), ids);
      asked.insert(asked.end(), static_cast<size_t>(options.samples), s);
    }
    const auto lists = models::generate(model, rows, writing);
    for (size_t i = 0; i < lists.size(); ++i) {
      auto& names = all[asked[i]];
      for (auto& name : names_of(tokenizer.decode(lists[i], true), subjects[asked[i]]))
        if (std::ssize(names) < options.count && std::ranges::find(names, name) == names.end())
          names.push_back(std::move(name));
    }
  }
  return all;
}

}  // namespace emend::editors
