// JSON as the MEMIT repository writes it, strict, with the line of every key.
#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/hparams/detail/readers.h>

#include <iterator>
#include <nlohmann/json.hpp>

namespace emend::hparams::detail {

namespace {

/// Walks over the text and counts lines, so that an event knows where it is.
struct LineIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  int* line;
  reference operator*() const { return *at; }
  LineIterator& operator++() {
    if (*at == '\n') ++*line;
    ++at;
    return *this;
  }
  LineIterator operator++(int) {
    LineIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const LineIterator& other) const { return at == other.at; }
  bool operator!=(const LineIterator& other) const { return at != other.at; }
};

class Events final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Events(TreeBuilder& tree, int& line, std::string_view text) : tree_(tree), line_(line), text_(text) {}

  bool null() override { return leaf(RawValue::Kind::kNull, "null", false); }
  bool boolean(bool value) override { return leaf(RawValue::Kind::kScalar, value ? "true" : "false", false); }
  bool number_integer(number_integer_t value) override {
    return leaf(RawValue::Kind::kScalar, std::to_string(value), false);
  }
  bool number_unsigned(number_unsigned_t value) override {
    return leaf(RawValue::Kind::kScalar, std::to_string(value), false);
  }
  bool number_float(number_float_t, const string_t& text) override {
    return leaf(RawValue::Kind::kScalar, text, false);
  }
  bool string(string_t& value) override { return leaf(RawValue::Kind::kScalar, value, true); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return tree_.begin(RawValue::Kind::kMap, line_), true; }
  bool end_object() override { return tree_.end(), true; }
  bool start_array(std::size_t) override { return tree_.begin(RawValue::Kind::kSequence, line_), true; }
  bool end_array() override { return tree_.end(), true; }
  bool key(string_t& name) override { return tree_.key(name, line_), true; }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string reason = error.what();
    if (const size_t colon = reason.rfind(": syntax error"); colon != std::string::npos)
      reason = reason.substr(colon + 2);
    const size_t offset = position == 0 ? 0 : position - 1;
    tree_.fail(static_cast<int>(line_of_offset(text_, offset)), reason, "JSON",
               "check commas and brackets at this line");
  }

 private:
  bool leaf(RawValue::Kind kind, const std::string& text, bool quoted) {
    RawValue value;
    value.kind = kind;
    value.text = text;
    value.quoted = quoted;
    value.json = true;
    value.line = line_;
    tree_.leaf(std::move(value));
    return true;
  }

  TreeBuilder& tree_;
  int& line_;
  std::string_view text_;
};

}  // namespace

RawValue read_json(std::string_view text, const std::string& source) {
  TreeBuilder tree(source);
  int line = 1;
  Events events(tree, line, text);
  const char* begin = text.data();
  nlohmann::json::sax_parse(LineIterator{begin, &line}, LineIterator{begin + text.size(), &line}, &events);
  return tree.take();
}

}  // namespace emend::hparams::detail
