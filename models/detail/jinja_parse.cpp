// Tokens as a tree: Jinja's grammar, in the order of its parser.
#include <emend/core/text.h>
#include <emend/models/detail/jinja_node.h>

#include <algorithm>

namespace emend::models::detail::jinja {
namespace {

constexpr int kDeepest = 200;  // of blocks, brackets and chains of operators

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokens_of(source)) {}

  Node run() {
    Node root = block({});
    if (now().type != Token::kEnd) fail("unexpected " + shown());
    return root;
  }

 private:
  struct Nested {
    explicit Nested(Parser& parser) : depth(parser.depth_) {
      if (++depth > kDeepest) parser.fail("nested too deeply");
    }
    ~Nested() { --depth; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    int& depth;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() {
    Token token = now();
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  bool is_operator(std::string_view text) const { return now().type == Token::kOperator && now().text == text; }
  bool is_name(std::string_view text) const { return now().type == Token::kName && now().text == text; }
  bool take_operator(std::string_view text) { return is_operator(text) && (take(), true); }
  bool take_name(std::string_view text) { return is_name(text) && (take(), true); }
  void expect_operator(std::string_view text) {
    if (!take_operator(text)) fail("\"" + std::string(text) + "\" is missing before " + shown());
  }
  std::string expect_name() {
    if (now().type != Token::kName) fail("a name is missing before " + shown());
    return take().text;
  }
  void expect(Token::Type type) {
    if (now().type != type) fail("unexpected " + shown());
    take();
  }
  std::string shown() const {
    const bool ends = now().type == Token::kBlockEnd || now().type == Token::kPrintEnd || now().type == Token::kEnd;
    return ends ? "end" : "\"" + shorten(now().text, 40) + "\"";
  }
  [[noreturn]] void fail(const std::string& what) const { throw SyntaxFault{now().line, what}; }

  Node make(Kind kind, int line, std::vector<Node> kids, std::string name = {}) const {
    Node node{kind, line, std::move(name), {}, std::move(kids)};
    return finished(std::move(node));
  }
  Node finished(Node node) const {
    for (const Node& kid : node.kids) node.depth = std::max(node.depth, kid.depth + 1);
    for (const auto& [name, kid] : node.named) node.depth = std::max(node.depth, kid.depth + 1);
    if (node.depth > kDeepest) fail("nested too deeply");
    return node;
  }
  static Node literal(decltype(Value::data) data, int line) {
    return {Kind::kLiteral, line, {}, Value{std::move(data)}};
  }
  static Node text(std::string content, int line, Kind kind = Kind::kLiteral) {
    return {kind, line, {}, Value{std::make_shared<const std::string>(std::move(content))}};
  }

  // ---- statements

  // Up to a tag with one of these names, which stays.
  Node block(const std::vector<std::string_view>& ends) {
    const Nested nested(*this);
    const int line = now().line;
    std::vector<Node> kids;
    while (now().type != Token::kEnd) {
      if (now().type == Token::kData) {
        kids.push_back(text(now().text, now().line, Kind::kText));
        take();
      } else if (now().type == Token::kPrintBegin) {
        const int at = take().line;
        kids.push_back(make(Kind::kPrint, at, {tuple()}));
        expect(Token::kPrintEnd);
      } else {
        if (std::ranges::find(ends, next().text) != ends.end() && next().type == Token::kName) break;
        expect(Token::kBlockBegin);
        kids.push_back(statement());
      }
    }
    if (now().type == Token::kEnd && !ends.empty()) fail("{% " + std::string(ends.back()) + " %} is missing");
    return make(Kind::kBlock, line, std::move(kids));
  }

  // Passes "{% name %}", where block() has stopped.
  std::string take_end(bool whole = true) {
    take();
    std::string name = expect_name();
    if (whole) expect(Token::kBlockEnd);
    return name;
  }

  Node statement() {
    const int line = now().line;
    const std::string name = expect_name();
    if (name == "if") return if_statement(line);
    if (name == "for") return for_statement(line);
    if (name == "set") return set_statement(line);
    if (name == "macro") return macro_statement(line);
    if (name == "break" || name == "continue") {
      expect(Token::kBlockEnd);
      if (loops_ == 0) fail("\"" + name + "\" outside of a loop");
      return make(name == "break" ? Kind::kBreak : Kind::kContinue, line, {});
    }
    if (name == "generation") {
      expect(Token::kBlockEnd);
      Node body = block({"endgeneration"});
      take_end();
      return make(Kind::kScope, line, {std::move(body)});
    }
    throw SyntaxFault{line, "the statement \"" + name + "\""};
  }

  Node if_statement(int line) {
    std::vector<Node> kids;
    for (std::string name = "if"; name != "endif";) {
      if (name != "else") kids.push_back(tuple(false));
      expect(Token::kBlockEnd);
      kids.push_back(name == "else" ? block({"endif"}) : block({"elif", "else", "endif"}));
      name = take_end(false);
    }
    expect(Token::kBlockEnd);
    return make(Kind::kIf, line, std::move(kids));
  }

  Node for_statement(int line) {
    Node target = targets();
    if (!take_name("in")) fail("\"in\" is missing before " + shown());
    Node range = tuple(false);
    Node filter;
    if (take_name("if")) filter = expression();
    if (is_name("recursive")) fail("a recursive loop");
    expect(Token::kBlockEnd);
    ++loops_;
    Node body = block({"else", "endfor"});
    --loops_;
    Node otherwise;
    if (take_end() == "else") {
      otherwise = block({"endfor"});
      take_end();
    }
    return make(Kind::kFor, line,
                {std::move(target), std::move(range), std::move(filter), std::move(body), std::move(otherwise)});
  }

  Node set_statement(int line) {
    Node target;
    if (next().type == Token::kOperator && next().text == ".") {
      target = {Kind::kName, line, expect_name()};
      take();
      const std::string name = expect_name();
      target = make(Kind::kAttribute, line, {std::move(target)}, name);
    } else {
      target = targets();
    }
    if (take_operator("=")) {
      Node value = tuple();
      expect(Token::kBlockEnd);
      return make(Kind::kSet, line, {std::move(target), std::move(value)});
    }
    Node value{Kind::kName, line, kCaptured};
    while (is_operator("|")) value = filter(std::move(value));
    expect(Token::kBlockEnd);
    Node body = block({"endset"});
    take_end();
    return make(Kind::kSetBlock, line, {std::move(target), std::move(body), std::move(value)});
  }

  Node macro_statement(int line) {
    Node macro{Kind::kMacro, line, expect_name()};
    expect_operator("(");
    while (!take_operator(")")) {
      const std::string name = expect_name();
      macro.named.emplace_back(name, take_operator("=") ? expression() : Node());
      if (!is_operator(")")) expect_operator(",");
    }
    expect(Token::kBlockEnd);
    const int loops = std::exchange(loops_, 0);
    macro.kids.push_back(block({"endmacro"}));
    loops_ = loops;
    take_end();
    return finished(std::move(macro));
  }

  // One name, or several with commas, for what is assigned.
  Node targets() {
    const Nested nested(*this);
    const int line = now().line;
    std::vector<Node> names;
    bool several = false;
    do {
      if (several && !(now().type == Token::kName || is_operator("("))) break;
      if (take_operator("(")) {
        names.push_back(targets());
        expect_operator(")");
      } else {
        names.push_back({Kind::kName, now().line, expect_name()});
        if (names.back().name == "in") fail("a name is missing");
      }
    } while (take_operator(",") && (several = true) && !is_name("in"));
    return several ? make(Kind::kTuple, line, std::move(names)) : std::move(names[0]);
  }

  // ---- expressions

  bool ends_tuple() const {
    return now().type == Token::kPrintEnd || now().type == Token::kBlockEnd || is_operator(")") || is_operator("=") ||
           is_name("in");
  }

  // An expression, or several with commas between.
  Node tuple(bool with_choice = true, bool may_be_empty = false) {
    const int line = now().line;
    std::vector<Node> kids;
    bool several = false;
    while (!ends_tuple()) {
      kids.push_back(with_choice ? expression() : any_of());
      if (!take_operator(",")) break;
      several = true;
    }
    if (kids.empty() && !may_be_empty) fail("an expression is missing before " + shown());
    return several || kids.empty() ? make(Kind::kTuple, line, std::move(kids)) : std::move(kids[0]);
  }

  Node expression() {
    const Nested nested(*this);
    Node value = any_of();
    while (is_name("if")) {
      const int line = take().line;
      Node condition = any_of(), otherwise;
      if (take_name("else")) otherwise = expression();
      value = make(Kind::kChoice, line, {std::move(value), std::move(condition), std::move(otherwise)});
    }
    return value;
  }

  Node any_of() { return chain("or", Kind::kOr, &Parser::all_of); }
  Node all_of() { return chain("and", Kind::kAnd, &Parser::negation); }
  Node chain(std::string_view word, Kind kind, Node (Parser::*part)()) {
    Node left = (this->*part)();
    while (is_name(word)) {
      const int line = take().line;
      left = make(kind, line, {std::move(left), (this->*part)()});
    }
    return left;
  }

  Node negation() {
    const Nested nested(*this);
    if (!is_name("not")) return comparison();
    const int line = take().line;
    return make(Kind::kNot, line, {negation()});
  }

  std::string comparing() {
    for (const std::string_view op : {"==", "!=", "<", "<=", ">", ">="})
      if (take_operator(op)) return std::string(op);
    if (take_name("in")) return "in";
    if (!is_name("not") || next().type != Token::kName || next().text != "in") return "";
    take(), take();
    return "not in";
  }

  Node comparison() {
    const int line = now().line;
    Node first = binary(0);
    Node node{Kind::kCompare, line};
    for (std::string op; !(op = comparing()).empty();) node.named.emplace_back(op, binary(0));
    if (node.named.empty()) return first;
    node.kids.push_back(std::move(first));
    return finished(std::move(node));
  }

  Node binary(size_t level) {
    static const std::vector<std::vector<std::string_view>> kLevels = {
        {"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
    if (level == kLevels.size()) return unary();
    Node left = binary(level + 1);
    while (now().type == Token::kOperator && std::ranges::find(kLevels[level], now().text) != kLevels[level].end()) {
      const Token op = take();
      Node right = binary(level + 1);
      left = make(Kind::kBinary, op.line, {std::move(left), std::move(right)}, op.text);
    }
    return left;
  }

  Node unary(bool with_filters = true) {
    const Nested nested(*this);
    const int line = now().line;
    Node node;
    if (take_operator("-")) {
      node = make(Kind::kNegate, line, {unary(false)});
    } else if (take_operator("+")) {
      node = make(Kind::kPlus, line, {unary(false)});
    } else {
      node = primary();
    }
    node = postfix(std::move(node));
    while (with_filters) {
      if (is_operator("|")) {
        node = filter(std::move(node));
      } else if (is_name("is")) {
        node = test(std::move(node));
      } else if (is_operator("(")) {
        node = call(std::move(node));
      } else {
        break;
      }
    }
    return node;
  }

  static Node number(const Token& token) {
    const auto whole = number_in<int64_t>(token.text);
    const auto real = number_in<double>(token.text);
    if (token.type == Token::kWhole ? !whole : !real)
      throw SyntaxFault{token.line, "the number " + shorten(token.text, 40)};
    return token.type == Token::kWhole ? literal(*whole, token.line) : literal(*real, token.line);
  }

  Node primary() {
    const Token token = take();
    const int line = token.line;
    switch (token.type) {
      case Token::kName:
        if (token.text == "true" || token.text == "True") return literal(true, line);
        if (token.text == "false" || token.text == "False") return literal(false, line);
        if (token.text == "none" || token.text == "None") return literal(None(), line);
        return {Kind::kName, line, token.text};
      case Token::kText: {
        std::string content = token.text;
        while (now().type == Token::kText) content += take().text;
        return text(std::move(content), line);
      }
      case Token::kWhole:
      case Token::kReal:
        return number(token);
      default:
        break;
    }
    if (token.type == Token::kOperator && token.text == "(") {
      Node inner = tuple(true, true);
      expect_operator(")");
      return inner;
    }
    if (token.type == Token::kOperator && (token.text == "[" || token.text == "{")) return display(token);
    --at_;
    fail("unexpected " + shown());
  }

  // [a, b] and {a: b}
  Node display(const Token& open) {
    const bool dict = open.text == "{";
    const std::string_view close = dict ? "}" : "]";
    std::vector<Node> kids;
    while (!take_operator(close)) {
      kids.push_back(expression());
      if (dict) {
        expect_operator(":");
        kids.push_back(expression());
      }
      if (!is_operator(close)) expect_operator(",");
    }
    return make(dict ? Kind::kDict : Kind::kList, open.line, std::move(kids));
  }

  Node postfix(Node node) {
    for (;;) {
      const int line = now().line;
      if (take_operator(".")) {
        const std::string name = expect_name();
        node = make(Kind::kAttribute, line, {std::move(node)}, name);
      } else if (take_operator("[")) {
        node = subscript(std::move(node), line);
      } else if (is_operator("(")) {
        node = call(std::move(node));
      } else {
        return node;
      }
    }
  }

  Node subscript(Node node, int line) {
    std::vector<Node> parts = {std::move(node)};
    bool slice = false;
    for (size_t part = 1; part <= 3; ++part) {
      parts.push_back(is_operator(":") || is_operator("]") ? literal(None(), line) : expression());
      if (!take_operator(":")) break;
      slice = true;
    }
    expect_operator("]");
    if (!slice && parts[1].kind == Kind::kLiteral && parts[1].value.none()) fail("an index is missing");
    while (slice && parts.size() < 4) parts.push_back(literal(None(), line));
    return make(slice ? Kind::kSlice : Kind::kIndex, line, std::move(parts));
  }

  Node call(Node node) {
    Node made{Kind::kCall, now().line};
    made.kids.push_back(std::move(node));
    arguments(made);
    return finished(std::move(made));
  }

  void arguments(Node& node) {
    expect_operator("(");
    while (!take_operator(")")) {
      if (is_operator("*") || is_operator("**")) fail("arguments with " + now().text);
      if (now().type == Token::kName && next().type == Token::kOperator && next().text == "=") {
        const std::string name = take().text;
        take();
        node.named.emplace_back(name, expression());
      } else if (node.named.empty()) {
        node.kids.push_back(expression());
      } else {
        fail("an argument without a name behind one with a name");
      }
      if (!is_operator(")")) expect_operator(",");
    }
  }

  Node filter(Node node) {
    const int line = take().line;
    Node made{Kind::kFilter, line, expect_name()};
    made.kids.push_back(std::move(node));
    if (is_operator("(")) arguments(made);
    return finished(std::move(made));
  }

  Node test(Node node) {
    const int line = take().line;
    const bool negated = take_name("not");
    Node made{Kind::kTest, line, expect_name()};
    made.kids.push_back(std::move(node));
    const bool value = now().type == Token::kName || now().type == Token::kText || now().type == Token::kWhole ||
                       now().type == Token::kReal || is_operator("[") || is_operator("{");
    if (is_operator("(")) {
      arguments(made);
    } else if (value && !is_name("else") && !is_name("or") && !is_name("and")) {
      if (is_name("is")) fail("tests in a chain");
      made.kids.push_back(postfix(primary()));
    }
    made = finished(std::move(made));
    return negated ? make(Kind::kNot, line, {std::move(made)}) : made;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

Node parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace emend::models::detail::jinja
