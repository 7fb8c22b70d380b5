// YAML as EasyEdit writes it, through yaml-cpp's event stream: no node graph is built, so anchors cannot multiply, and
// depth and duplicates are checked while reading.
#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/hparams/detail/readers.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <istream>
#include <sstream>

namespace emend::hparams::detail {

namespace {

class Events final : public YAML::EventHandler {
 public:
  explicit Events(TreeBuilder& tree) : tree_(tree) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnAnchor(const YAML::Mark& mark, const std::string&) override { no_anchors(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { no_anchors(mark); }
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { scalar(mark, "?", "null"); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& value) override {
    scalar(mark, tag, value);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    check_tag(mark, tag);
    tree_.begin(RawValue::Kind::kSequence, line(mark));
  }
  void OnSequenceEnd() override { tree_.end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, YAML::EmitterStyle::value) override {
    check_tag(mark, tag);
    tree_.begin(RawValue::Kind::kMap, line(mark));
  }
  void OnMapEnd() override { tree_.end(); }

  static int line(const YAML::Mark& mark) { return mark.line + 1; }

 private:
  [[noreturn]] void no_anchors(const YAML::Mark& mark) const {
    tree_.fail(line(mark), "an anchor or alias (& or *)", "plain values", "write the value out, or put it in quotes");
  }
  void check_tag(const YAML::Mark& mark, const std::string& tag) const {
    if (!tag.empty() && tag != "?" && tag != "!")
      tree_.fail(line(mark), "the tag " + tag.substr(0, 40), "plain values", "remove the tag");
  }
  void scalar(const YAML::Mark& mark, const std::string& tag, const std::string& text) {
    check_tag(mark, tag);
    if (first_invalid_utf8(text))  // yaml-cpp reads "\N" and "\_" as one byte
      tree_.fail(line(mark), "text that is not UTF-8", "text in UTF-8",
                 "write the character itself instead of the escape \\N or \\_");
    const bool quoted = tag == "!";
    if (tree_.wants_key()) {
      if (text == "<<" && !quoted) no_anchors(mark);
      tree_.key(text, line(mark));
      return;
    }
    RawValue value;
    const bool null = !quoted && (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL");
    value.kind = null ? RawValue::Kind::kNull : RawValue::Kind::kScalar;
    value.text = text;
    value.quoted = quoted;
    value.line = line(mark);
    tree_.leaf(std::move(value));
  }

  TreeBuilder& tree_;
};

}  // namespace

RawValue read_yaml(std::string_view text, const std::string& source) {
  TreeBuilder tree(source);
  Events events(tree);
  std::istringstream stream{std::string(text)};
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(events)) {
    }
  } catch (const YAML::ParserException& error) {
    tree.fail(error.mark.is_null() ? 1 : Events::line(error.mark), "bad YAML: " + error.msg,
              "YAML with one hyper-parameter a key", "check indentation, quotes and brackets at this line");
  } catch (const YAML::Exception& error) {
    tree.fail(1, std::string("bad YAML: ") + error.what(), "YAML with one hyper-parameter a key", "");
  }
  return tree.take();
}

}  // namespace emend::hparams::detail
