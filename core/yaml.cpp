// Through yaml-cpp's event stream: without a node graph anchors cannot multiply; depth and keys are checked on the way.
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/core/yaml.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <sstream>

namespace emend {
namespace {

constexpr int kMaxDepth = 64;
using Kind = YamlValue::Kind;

class YamlBuilder final : public YAML::EventHandler {
 public:
  YamlBuilder(const YamlNames& names, bool json) : names_(names), json_(json) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnAnchor(const YAML::Mark& mark, const std::string&) override { no_anchors(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { no_anchors(mark); }
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { scalar(mark, "?", "null"); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& text) override {
    scalar(mark, tag, text);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    begin(Kind::kSequence, mark, tag);
  }
  void OnSequenceEnd() override { end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    begin(Kind::kMap, mark, tag);
  }
  void OnMapEnd() override { end(); }

  static int line_of(const YAML::Mark& mark) { return mark.is_null() ? 1 : mark.line + 1; }
  [[noreturn]] void fail(int line, const std::string& got, const std::string& expected,
                         const std::string& advice = "") const {
    refuse({names_.lines ? names_.where + ":" + std::to_string(line) : names_.where, got, expected, advice});
  }
  /// The finished tree.
  [[nodiscard]] YamlValue take() {
    if (!done_) fail(1, "no " + names_.thing + "s", "YAML or JSON with one " + names_.thing + " a key");
    return std::move(root_);
  }

 private:
  struct Open {
    YamlValue value;
    bool key_pending = false;  // a key was read, its value not yet
    int key_line = 0;
  };

  [[noreturn]] void no_anchors(const YAML::Mark& mark) const {
    fail(line_of(mark), "an anchor or alias (& or *)", "plain values", "write the value out, or put it in quotes");
  }
  void check_tag(const YAML::Mark& mark, const std::string& tag) const {
    if (!tag.empty() && tag != "?" && tag != "!")
      fail(line_of(mark), "the tag " + tag.substr(0, 40), "plain values", "remove the tag");
  }
  [[nodiscard]] bool wants_key() const {
    return !open_.empty() && open_.back().value.kind == Kind::kMap && !open_.back().key_pending;
  }

  void begin(Kind kind, const YAML::Mark& mark, const std::string& tag) {
    check_tag(mark, tag);
    if (open_.size() >= static_cast<size_t>(kMaxDepth))
      fail(line_of(mark), "nesting of more than " + std::to_string(kMaxDepth) + " levels",
           "a flat list of " + names_.thing + "s", "check the file");
    if (wants_key()) fail(line_of(mark), "a list or map as a key", "a name");
    open_.push_back({{kind, "", false, false, {}, {}, line_of(mark)}});
  }
  void end() {
    YamlValue value = std::move(open_.back().value);
    open_.pop_back();
    place(std::move(value));
  }
  void scalar(const YAML::Mark& mark, const std::string& tag, const std::string& text) {
    check_tag(mark, tag);
    if (first_invalid_utf8(text))  // yaml-cpp reads "\N" and "\_" as one byte
      fail(line_of(mark), "text that is not UTF-8", "text in UTF-8",
           "write the character itself instead of the escape \\N or \\_");
    const bool quoted = tag == "!";
    if (wants_key()) {
      if (text == "<<" && !quoted) no_anchors(mark);
      key(text, line_of(mark));
      return;
    }
    const bool null = !quoted && (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL");
    place({null ? Kind::kNull : Kind::kScalar, text, quoted, json_, {}, {}, line_of(mark)});
  }
  void key(const std::string& name, int line) {
    Open& map = open_.back();
    if (std::ranges::find(map.value.keys, name) != map.value.keys.end())
      fail(line, "\"" + name + "\" is given twice", "each key once", "remove one of them");
    map.value.keys.push_back(name);
    map.key_pending = true;
    map.key_line = line;
  }
  void place(YamlValue value) {
    if (open_.empty()) {
      if (done_) fail(value.line, "a second document", "one", "remove everything from the second --- on");
      root_ = std::move(value);
      done_ = true;
      return;
    }
    Open& parent = open_.back();
    if (parent.value.kind == Kind::kMap) {
      value.line = parent.key_line;  // messages point at the key
      parent.key_pending = false;
    }
    parent.value.items.push_back(std::move(value));
  }

  const YamlNames& names_;
  bool json_;
  std::vector<Open> open_;
  YamlValue root_;
  bool done_ = false;
};

}  // namespace

const YamlValue* YamlValue::find(std::string_view key) const {
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return &items[i];
  return nullptr;
}

std::string YamlValue::show() const {
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kScalar:
      return quoted ? "\"" + shorten(text, 60) + "\"" : shorten(text, 60);
    case Kind::kMap:
      return keys.empty() ? "{}" : "{" + shorten(keys.front(), 60) + ": …}";
    case Kind::kSequence:
      break;
  }
  std::string list = "[";
  for (const YamlValue& item : items) {
    if (list.size() > 60) return list + "…]";
    list += (list.size() > 1 ? ", " : "") + item.show();
  }
  return list + "]";
}

YamlValue parse_yaml(std::string_view text, const YamlNames& names) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  const bool json = names.lines && first != std::string_view::npos && text[first] == '{';
  YamlBuilder builder(names, json);
  if (json) {  // every JSON text is YAML, but not the reverse
    std::optional<JsonFault> fault;
    (void)parse_json(text, {.max_depth = kMaxDepth, .repeated_keys = true}, fault);
    if (fault)
      builder.fail(static_cast<int>(line_of_offset(text, fault->offset)), fault->what, "JSON",
                   "check commas and brackets at this line");
  }
  std::istringstream stream{std::string(text)};
  const std::string expected = "YAML with one " + names.thing + " a key";
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::ParserException& error) {
    builder.fail(YamlBuilder::line_of(error.mark), "bad YAML: " + error.msg, expected,
                 "check indentation, quotes and brackets at this line");
  } catch (const YAML::Exception& error) {
    builder.fail(1, std::string("bad YAML: ") + error.what(), expected);
  }
  return builder.take();
}

}  // namespace emend
