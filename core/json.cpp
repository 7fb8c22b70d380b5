#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/utf8.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace emend {
namespace {

using Json = nlohmann::json;

/// Walks over a text and tells how far it is, for the faults that the parser does not see.
struct JsonCursor {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** reached;
  reference operator*() const { return *at; }
  JsonCursor& operator++() {
    *reached = ++at;
    return *this;
  }
  bool operator==(const JsonCursor& other) const { return at == other.at; }
  bool operator!=(const JsonCursor& other) const { return at != other.at; }
};

std::string printable(std::string text) {
  text.resize(std::min<size_t>(text.size(), 300));
  for (char& c : text)
    if (c < 0x20 || c > 0x7e) c = '?';
  return text;
}

/// Builds the document while it watches depth and keys. (The parser's own callbacks take quadratic time in its size.)
class JsonBuilder final : public nlohmann::json_sax<Json> {
 public:
  JsonBuilder(const JsonRules& rules, const char* begin) : rules_(rules), begin_(begin), reached_(begin) {}

  Json root;
  std::optional<JsonFault> fault;
  const char** reached() { return &reached_; }

  bool null() override { return place(nullptr); }
  bool boolean(bool value) override { return place(value); }
  bool number_integer(number_integer_t value) override { return place(value); }
  bool number_unsigned(number_unsigned_t value) override { return place(value); }
  bool number_float(number_float_t value, const string_t&) override { return place(value); }
  bool string(string_t& value) override { return place(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    const auto [member, fresh] = open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    member_ = &member->second;
    return fresh || rules_.repeated_keys || fail("the key \"" + member->first + "\" is given twice in one object");
  }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    const std::string reason = reason_of(error);
    const size_t at = reason.find("syntax error");
    return fail_at(position == 0 ? 0 : position - 1, at == std::string::npos ? reason : reason.substr(at));
  }

 private:
  /// At the character that was read last.
  bool fail(const std::string& what) { return fail_at(static_cast<size_t>(reached_ - begin_) - 1, what); }
  bool fail_at(size_t offset, const std::string& what) {
    fault = {offset, printable(what)};
    return false;
  }
  bool open(Json container) {
    if (open_.size() >= static_cast<size_t>(rules_.max_depth))
      return fail("nesting of more than " + std::to_string(rules_.max_depth) + " levels");
    place(std::move(container));
    open_.push_back(placed_);
    return true;
  }
  bool place(Json value) {
    if (open_.empty()) {
      placed_ = &(root = std::move(value));
    } else if (open_.back()->is_array()) {
      placed_ = &open_.back()->emplace_back(std::move(value));
    } else {
      placed_ = &(*member_ = std::move(value));
    }
    return true;
  }

  const JsonRules& rules_;
  const char* begin_;
  const char* reached_;
  std::vector<Json*> open_;  // a container does not move while it is open
  Json* member_ = nullptr;   // of the key that was read last
  Json* placed_ = nullptr;
};

}  // namespace

std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.starts_with("[json.exception.") ? text.find("] ") : text.npos;
  return printable(end == text.npos ? text : text.substr(end + 2));
}

Json parse_json(std::string_view text, const JsonRules& rules, std::optional<JsonFault>& fault) {
  const size_t skipped = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  text.remove_prefix(skipped);
  JsonBuilder builder(rules, text.data());
  const JsonCursor begin{text.data(), builder.reached()}, end{text.data() + text.size(), builder.reached()};
  fault.reset();
  if (Json::sax_parse(begin, end, &builder)) return std::move(builder.root);
  fault = std::move(builder.fault);
  if (!fault) fault = JsonFault{0, "not JSON"};
  fault->offset = std::min(fault->offset, text.size()) + skipped;
  return nullptr;
}

Json parse_json(std::string_view text, const std::string& where, const JsonRules& rules) {
  if (text.size() > rules.max_bytes)
    throw Error(rules.error_class, {where, std::to_string(text.size()) + " bytes of JSON",
                                    "at most " + std::to_string(rules.max_bytes), "check that this is the right file"});
  std::optional<JsonFault> fault;
  Json document = parse_json(text, rules, fault);
  if (!fault) return document;
  if (text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF"))
    throw Error(rules.error_class, {where, "UTF-16", rules.expected, "save the file as UTF-8"});
  const size_t before = text.substr(0, fault->offset).rfind('\n');
  const size_t column = fault->offset - (before == std::string_view::npos ? 0 : before + 1) + 1;
  throw Error(rules.error_class,
              {where + ":" + std::to_string(line_of_offset(text, fault->offset)) + ":" + std::to_string(column),
               "not valid JSON (" + fault->what + ")", rules.expected, rules.advice});
}

Json read_json(const std::filesystem::path& path, const JsonRules& rules) {
  return parse_json(MappedFile(path).text(), path.string(), rules);
}

}  // namespace emend
