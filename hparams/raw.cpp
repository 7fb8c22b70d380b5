#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/hparams/raw.h>

#include <algorithm>

namespace emend::hparams {
namespace {

constexpr size_t kMaxBytes = 256 * 1024;  // the largest published file has 3 KiB

void require_short(size_t bytes, const std::string& source) {
  if (bytes > kMaxBytes)
    refuse({source, std::to_string(bytes) + " bytes", "a hyper-parameter file of at most 256 KiB", "check the path"});
}

}  // namespace

void RawHparams::add(RawEntry entry) {
  if (const RawEntry* old = find(entry.key))
    refuse({entry.where, "\"" + entry.key + "\" is given twice", "each key once", "the first is at " + old->where});
  entries_.push_back(std::move(entry));
}

void RawHparams::set(std::string_view assignment) {
  const std::string where = setting("set", shorten(assignment, 60));
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0)
    refuse({where, "no KEY=VALUE", "for example " + setting("set", "v_lr=0.1"), ""});
  const std::string key(assignment.substr(0, equals));
  if (key.find_first_of(" \t\n\"'{}[]:,") != std::string::npos)
    refuse({where, "\"" + key + "\" is not a key",
            "letters, digits and _ before the =", "quote the whole assignment for the shell"});
  std::string text(assignment.substr(equals + 1));
  // layers=4,5 is what people type; YAML would call it one string.
  if (text.find(',') != std::string::npos && text.find_first_of("[{\"'") == std::string::npos) text = "[" + text + "]";
  RawEntry entry{key, {}, where};
  if (text.size() > kMaxBytes)
    refuse({where, "a value of " + std::to_string(text.size()) + " bytes", "a short value", ""});
  if (const auto bad = first_invalid_utf8(text)) refuse({where, "a byte that is not UTF-8", "UTF-8 text", ""});
  if (text.find_first_not_of(" \t") != std::string::npos)
    entry.value = parse_yaml(text, {where, "hyper-parameter", /*lines=*/false});
  entry.value.line = 0;  // of no file: 5 may stand for [5]
  const auto old = std::ranges::find(entries_, key, &RawEntry::key);
  (old == entries_.end() ? entries_.emplace_back() : *old) = std::move(entry);
}

const RawEntry* RawHparams::find(std::string_view key) const {
  const auto found = std::ranges::find(entries_, key, &RawEntry::key);
  return found == entries_.end() ? nullptr : &*found;
}

std::string RawHparams::where(std::string_view key) const {
  const RawEntry* entry = find(key);
  return entry ? entry->where : source_.empty() ? "hyper-parameters" : source_;
}

RawHparams parse_hparams(std::string_view text, const std::string& source) {
  require_short(text.size(), source);
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const auto line = [&](size_t offset) { return source + ":" + std::to_string(line_of_offset(text, offset)); };
  if (const auto bad = first_invalid_utf8(text))
    refuse({line(*bad), "a byte that is not UTF-8", "UTF-8 text", "save the file as UTF-8"});
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    refuse({line(nul), "a NUL byte", "text", "the file is binary or damaged"});
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
    refuse({source, "the file is empty", "YAML or JSON with one hyper-parameter a key", ""});
  const RawValue root = parse_yaml(text, {source, "hyper-parameter"});
  if (root.kind != RawValue::Kind::kMap)
    refuse({source + ":" + std::to_string(root.line), root.show() + " at the top",
            "keys with values, such as \"v_lr: 0.5\"", ""});
  RawHparams result(source);
  for (size_t i = 0; i < root.keys.size(); ++i)
    result.add({root.keys[i], root.items[i], source + ":" + std::to_string(root.items[i].line)});
  return result;
}

RawHparams load_hparams(const std::filesystem::path& path) {
  std::error_code failure;
  const auto size = std::filesystem::file_size(path, failure);  // refuse before reading gigabytes
  if (!failure) require_short(size, path.string());
  return parse_hparams(read_file(path), path.string());
}

}  // namespace emend::hparams
