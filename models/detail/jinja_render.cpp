// A parsed template as text.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/models/detail/jinja.h>
#include <emend/models/detail/jinja_node.h>

#include <map>

namespace emend::models::detail {
namespace jinja {

// Variables of a template, a loop's turn, a macro's call; others are looked for further out.
struct Scope {
  std::map<std::string, Value, std::less<>> values = {};
  std::shared_ptr<Scope> outer = {};
};

namespace {

constexpr int kDeepestCall = 400;  // expressions, statements and macros in each other
constexpr size_t kMostSource = 1U << 20;

enum class Flow { kOn, kBreak, kContinue };

class Renderer {
 public:
  std::string run(const Node& root, const nlohmann::ordered_json& variables) {
    for (const auto& [name, value] : variables.items()) scope_->values[name] = work_.from_json(value);
    return captured(root);
  }
  [[nodiscard]] int line() const { return line_; }

 private:
  struct Nested {
    explicit Nested(int& depth) : depth(depth) {
      if (++depth > kDeepestCall) throw Fault{"expressions or calls that are nested too deeply"};
    }
    ~Nested() { --depth; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    int& depth;
  };
  // A scope inside of `outer` until the end of the block.
  struct Inside {
    Inside(std::shared_ptr<Scope>& scope, std::shared_ptr<Scope> outer) : scope(scope), before(scope) {
      scope = std::make_shared<Scope>();
      scope->outer = std::move(outer);
    }
    ~Inside() { scope = before; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    std::shared_ptr<Scope>& scope;
    std::shared_ptr<Scope> before;
  };

  std::string captured(const Node& block) {
    std::string text;
    std::string* const before = std::exchange(out_, &text);
    const Flow flow = execute(block);
    out_ = before;
    if (flow != Flow::kOn) throw Fault{"\"break\" or \"continue\" inside a \"set\" block"};
    return text;
  }

  Flow execute(const Node& node) {
    const Nested nested(depth_);
    work_.step();
    line_ = node.line;
    switch (node.kind) {
      case Kind::kBlock:
        for (const Node& kid : node.kids)
          if (const Flow flow = execute(kid); flow != Flow::kOn) return flow;
        return Flow::kOn;
      case Kind::kScope: {
        const Inside inside(scope_, scope_);
        return execute(node.kids[0]);
      }
      case Kind::kText:
        append(*out_, *node.value.text());
        return Flow::kOn;
      case Kind::kPrint:
        append(*out_, str(evaluate(node.kids[0])));
        return Flow::kOn;
      case Kind::kIf:
        for (size_t i = 0; i + 1 < node.kids.size(); i += 2)
          if (truth(evaluate(node.kids[i]))) return execute(node.kids[i + 1]);
        return node.kids.size() % 2 == 1 ? execute(node.kids.back()) : Flow::kOn;
      case Kind::kFor:
        return loop(node);
      case Kind::kSet:
        assign(node.kids[0], evaluate(node.kids[1]));
        return Flow::kOn;
      case Kind::kSetBlock:
        assign(node.kids[0], block_value(node));
        return Flow::kOn;
      case Kind::kMacro:
        scope_->values[node.name] = {std::make_shared<const Callable>(Callable{node.name, {}, &node, scope_})};
        return Flow::kOn;
      case Kind::kBreak:
        return Flow::kBreak;
      case Kind::kContinue:
        return Flow::kContinue;
      default:
        return Flow::kOn;
    }
  }

  Value block_value(const Node& node) {
    const Inside inside(scope_, scope_);
    Value text = work_.text(captured(node.kids[1]));
    scope_->values[kCaptured] = std::move(text);
    return evaluate(node.kids[2]);
  }

  Flow loop(const Node& node) {
    const auto outer = scope_;
    std::vector<Value> items;
    for (Value& item : iterate(work_, evaluate(node.kids[1]))) {
      const Inside inside(scope_, outer);
      if (node.kids[2].kind != Kind::kNothing) {
        assign(node.kids[0], item);
        if (!truth(evaluate(node.kids[2]))) continue;
      }
      items.push_back(std::move(item));
    }
    bool whole = false;  // a turn ran to its end: `else` is for loops without one, as in Jinja
    for (size_t i = 0; i < items.size(); ++i) {
      const Inside inside(scope_, outer);
      assign(node.kids[0], items[i]);
      scope_->values["loop"] = loop_value(items, i);
      const Flow flow = execute(node.kids[3]);
      if (flow == Flow::kBreak) break;
      whole = whole || flow == Flow::kOn;
    }
    if (whole) return Flow::kOn;
    const Inside inside(scope_, outer);
    return execute(node.kids[4]);  // `continue` and `break` are those of the loop around this one
  }

  Value loop_value(const std::vector<Value>& items, size_t i) {
    const auto at = static_cast<int64_t>(i), size = std::ssize(items);
    Dict loop = {
        {"index", {at + 1}},     {"index0", {at}},           {"revindex", {size - at}}, {"revindex0", {size - at - 1}},
        {"first", {i == 0}},     {"last", {at + 1 == size}}, {"length", {size}},        {"depth", {int64_t{1}}},
        {"depth0", {int64_t{0}}}};  // of recursive loops, which are refused
    if (i > 0) loop.emplace_back("previtem", items[i - 1]);
    if (i + 1 < items.size()) loop.emplace_back("nextitem", items[i + 1]);
    return {std::make_shared<const Dict>(std::move(loop))};
  }

  void assign(const Node& target, const Value& value) {
    line_ = target.line;
    if (target.kind == Kind::kName) {
      scope_->values[target.name] = value;
    } else if (target.kind == Kind::kAttribute) {
      const Value space = variable(target.kids[0].name);
      const auto* held = std::get_if<Space*>(&space.data);
      if (!held) throw Fault{"an attribute set of " + type_name(space) + ", which is no namespace"};
      put(work_, (*held)->values, target.name, value);
    } else {
      const auto parts = iterate(work_, value);
      if (parts.size() != target.kids.size())
        throw Fault{std::to_string(parts.size()) + " values for " + std::to_string(target.kids.size()) + " names"};
      for (size_t i = 0; i < parts.size(); ++i) assign(target.kids[i], parts[i]);
    }
  }

  Value variable(const std::string& name) const {
    for (const Scope* scope = scope_.get(); scope; scope = scope->outer.get())
      if (const auto held = scope->values.find(name); held != scope->values.end()) return held->second;
    if (is_function(name)) return {std::make_shared<const Callable>(Callable{name})};
    return {Undefined{name}};
  }

  Value evaluate(const Node& node) {
    const Nested nested(depth_);
    work_.step();
    line_ = node.line;
    const auto kid = [&](size_t i) { return evaluate(node.kids[i]); };
    switch (node.kind) {
      case Kind::kLiteral:
        return node.value;
      case Kind::kName:
        return variable(node.name);
      case Kind::kList:
      case Kind::kTuple:
        return work_.list(values(node, 0), node.kind == Kind::kTuple);
      case Kind::kDict:
        return dict(node);
      case Kind::kAttribute:
        return attribute(work_, kid(0), node.name);
      case Kind::kIndex: {
        const Value all = kid(0);
        return item(work_, all, kid(1));
      }
      case Kind::kSlice: {
        const auto parts = values(node, 0);
        return sliced(work_, parts[0], parts[1], parts[2], parts[3]);
      }
      case Kind::kCall: {
        const Value callee = kid(0);
        Arguments given = arguments(node);
        return call(callee, given);
      }
      case Kind::kFilter: {
        const Value value = kid(0);
        Arguments given = arguments(node);
        return apply_filter(work_, node.name, value, given);
      }
      case Kind::kTest: {
        const Value value = kid(0);
        Arguments given = arguments(node);
        return {apply_test(work_, node.name, value, given)};
      }
      default:
        return operation(node);
    }
  }

  Value operation(const Node& node) {
    const Value first = node.kind == Kind::kChoice ? Value() : evaluate(node.kids[0]);
    switch (node.kind) {
      case Kind::kNot:
        return {!truth(first)};
      case Kind::kNegate:
        return arithmetic(work_, "-", {int64_t{0}}, first);
      case Kind::kPlus:
        return arithmetic(work_, "+", {int64_t{0}}, first);
      case Kind::kBinary:
        return arithmetic(work_, node.name, first, evaluate(node.kids[1]));
      case Kind::kAnd:
        return truth(first) ? evaluate(node.kids[1]) : first;
      case Kind::kOr:
        return truth(first) ? first : evaluate(node.kids[1]);
      case Kind::kChoice:
        if (truth(evaluate(node.kids[1]))) return evaluate(node.kids[0]);
        return node.kids[2].kind == Kind::kNothing ? Value() : evaluate(node.kids[2]);
      default:
        return compared(node, first);
    }
  }

  Value compared(const Node& node, Value left) {
    for (const auto& [op, right_node] : node.named) {
      Value right = evaluate(right_node);
      if (!holds(op, left, right)) return {false};
      left = std::move(right);
    }
    return {true};
  }

  bool holds(const std::string& op, const Value& a, const Value& b) {
    if (op == "==") return equal(work_, a, b);
    if (op == "!=") return !equal(work_, a, b);
    if (op == "in") return contains(work_, b, a);
    if (op == "not in") return !contains(work_, b, a);
    const int sign = order(work_, a, b);
    return op == "<" ? sign < 0 : op == ">" ? sign > 0 : op == "<=" ? sign <= 0 : sign >= 0;
  }

  std::vector<Value> values(const Node& node, size_t from) {
    std::vector<Value> all;
    for (size_t i = from; i < node.kids.size(); ++i) all.push_back(evaluate(node.kids[i]));
    return all;
  }

  Value dict(const Node& node) {
    Dict values;
    for (size_t i = 0; i < node.kids.size(); i += 2) {
      const Value key = evaluate(node.kids[i]);
      if (!key.text()) throw Fault{"a dict with a key that is no text"};
      put(work_, values, *key.text(), evaluate(node.kids[i + 1]));
    }
    return work_.dict(std::move(values));
  }

  Arguments arguments(const Node& node) {
    Arguments given{values(node, 1)};
    for (const auto& [name, value] : node.named) given.named.emplace_back(name, evaluate(value));
    return given;
  }

  Value call(const Value& callee, Arguments& given) {
    const auto* held = std::get_if<std::shared_ptr<const Callable>>(&callee.data);
    if (!held) throw Fault{"a call of " + type_name(callee)};
    const Callable& function = **held;
    if (function.macro) return call_macro(function, given);
    return function.self.undefined() ? call_function(work_, function.name, given)
                                     : call_method(work_, function.self, function.name, given);
  }

  Value call_macro(const Callable& macro, Arguments& given) {
    const auto outer = macro.scope.lock();
    if (!outer) throw Fault{"a macro called outside of where it was defined"};
    const Inside inside(scope_, outer);
    for (const auto& [name, otherwise] : macro.macro->named) {
      work_.step(given.named.size() / 16);
      const bool missing = !given.has(name) && otherwise.kind != Kind::kNothing;
      scope_->values[name] = missing ? evaluate(otherwise) : given.take(name);
    }
    given.done();
    return work_.text(captured(macro.macro->kids[0]));
  }

  Work work_;
  std::shared_ptr<Scope> scope_ = std::make_shared<Scope>();
  std::string* out_ = nullptr;
  int line_ = 1, depth_ = 0;
};

}  // namespace
}  // namespace jinja

Jinja::Jinja(std::string_view source, std::string where) : where_(std::move(where)) {
  const auto refuse_source = [&](int line, const std::string& what) {
    throw Error(ErrorClass::kUnsupported,
                {where_ + ":" + std::to_string(line), what, "the Jinja of chat templates", ""});
  };
  if (source.size() > jinja::kMostSource) refuse_source(1, "more than 1 MiB");
  if (const auto at = first_invalid_utf8(source))
    refuse_source(static_cast<int>(line_of_offset(source, *at)), "a byte that is not UTF-8");
  try {
    root_ = std::make_shared<const jinja::Node>(jinja::parse(source));
  } catch (const jinja::SyntaxFault& fault) {
    refuse_source(fault.line, fault.what);
  }
}

std::string Jinja::render(const nlohmann::ordered_json& variables) const {
  jinja::Renderer renderer;
  try {
    return renderer.run(*root_, variables);
  } catch (const jinja::Fault& fault) {
    const std::string where = where_ + ":" + std::to_string(renderer.line());
    if (fault.raised) throw Error(ErrorClass::kInvalidArgument, {where, shorten(fault.what, 500), "", ""});
    throw Error(ErrorClass::kUnsupported, {where, shorten(fault.what, 500), "what a chat template can compute", ""});
  }
}

}  // namespace emend::models::detail
