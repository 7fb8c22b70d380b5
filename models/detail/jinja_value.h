// Values of a template and what Python says of them: truth, equality, order, str(), repr(), JSON.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace emend::models::detail::jinja {

struct Node;
struct Scope;
struct List;
struct Callable;
struct Value;

/// What ends a rendering; the caller knows the line.
struct Fault {
  std::string what;
  bool raised = false;  ///< by the template's raise_exception
};

struct Undefined {
  std::string name;
};
struct None {};
using Dict = std::vector<std::pair<std::string, Value>>;
using Text = std::shared_ptr<const std::string>;

/// What namespace() makes: the only thing that changes after it was made. Owned by the rendering.
struct Space;

/// Lists, dicts and texts are shared and do not change.
struct Value {
  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const List>, std::shared_ptr<const Dict>,
               std::shared_ptr<const Callable>, Space*>
      data;
  int depth = 0;  ///< of lists and dicts in each other

  [[nodiscard]] const std::string* text() const;
  [[nodiscard]] const List* list() const;
  [[nodiscard]] const Dict* dict() const;
  [[nodiscard]] bool undefined() const { return std::holds_alternative<Undefined>(data); }
  [[nodiscard]] bool none() const { return std::holds_alternative<None>(data); }
  [[nodiscard]] std::optional<int64_t> whole() const;  ///< of integers and, as in Python, booleans
  [[nodiscard]] std::optional<double> real() const;    ///< of all numbers
};

struct List {
  std::vector<Value> items;
  bool tuple = false, lazy = false;  ///< lazy: Python's generator, which is true and has no length or text
};

struct Space {
  Dict values;
};

/// A function, a method of `self`, or a macro with the scope that it was defined in.
struct Callable {
  std::string name;
  Value self = {};
  const Node* macro = nullptr;
  std::weak_ptr<Scope> scope = {};
};

/// What a rendering has used up, and makes the values that cost memory.
class Work {
 public:
  /// Throws Fault if there were too many.
  void step(size_t count = 1);
  [[nodiscard]] Value text(std::string text);
  [[nodiscard]] Value list(std::vector<Value> items, bool tuple = false, bool lazy = false);
  [[nodiscard]] Value dict(Dict values);
  [[nodiscard]] Value space(Dict values);
  [[nodiscard]] Value from_json(const nlohmann::ordered_json& json);
  /// Steps for reading a value once.
  void read(const Value& value);
  /// Steps for looking for a text, or for one of its characters, in another.
  void search(std::string_view in, std::string_view what);

 private:
  size_t steps_ = 0, bytes_ = 0;
  std::deque<Space> spaces_;
};

/// Arguments of a call. A builtin takes those that it knows; done() refuses the rest.
struct Arguments {
  std::vector<Value> list = {};
  Dict named = {};
  size_t taken = 0;
  [[nodiscard]] Value take(std::string_view name, Value otherwise = {});
  [[nodiscard]] bool take_flag(std::string_view name, bool otherwise);
  [[nodiscard]] int64_t take_whole(std::string_view name, int64_t otherwise);
  [[nodiscard]] std::string take_text(std::string_view name, const char* otherwise = nullptr);
  [[nodiscard]] bool has(std::string_view name) const;  ///< whether take(name) has something to take
  void done() const;
};

/// What Python's dict[key] = value does: an earlier value keeps its place.
void put(Work& work, Dict& dict, const std::string& key, Value value);

inline constexpr size_t kMostBytes = 16U << 20;  ///< of one text
/// Throws Fault if `out` would become longer than that.
void append(std::string& out, std::string_view text);

[[nodiscard]] std::string type_name(const Value& value);
[[nodiscard]] bool truth(const Value& value);
[[nodiscard]] bool equal(Work& work, const Value& a, const Value& b);
/// Below, equal or above zero; throws Fault where Python has no order.
[[nodiscard]] int order(Work& work, const Value& a, const Value& b);
[[nodiscard]] std::string str(const Value& value);
struct JsonStyle {
  std::optional<int64_t> indent = {};
  std::string between = ", ", colon = ": ";
};
[[nodiscard]] std::string json_text(const Value& value, const JsonStyle& style);
/// What `for` goes through: items, keys, characters.
[[nodiscard]] std::vector<Value> iterate(Work& work, const Value& value);
[[nodiscard]] bool contains(Work& work, const Value& all, const Value& one);
/// x.name and x[key] as Jinja looks them up; undefined where there is none.
[[nodiscard]] Value attribute(Work& work, const Value& value, const std::string& name);
[[nodiscard]] Value item(Work& work, const Value& value, const Value& key);
[[nodiscard]] Value sliced(Work& work, const Value& value, const Value& from, const Value& to, const Value& by);
[[nodiscard]] Value arithmetic(Work& work, const std::string& op, const Value& a, const Value& b);

/// Texts as sequences of characters.
[[nodiscard]] std::vector<std::string_view> characters(std::string_view text);
[[nodiscard]] bool is_space(std::string_view character);
[[nodiscard]] std::string_view strip(std::string_view text, const std::optional<std::string>& of, bool left,
                                     bool right);

[[nodiscard]] bool has_method(const Value& value, std::string_view name);
[[nodiscard]] Value call_method(Work& work, const Value& self, const std::string& name, Arguments& arguments);
[[nodiscard]] Value call_function(Work& work, const std::string& name, Arguments& arguments);
[[nodiscard]] bool is_function(std::string_view name);
[[nodiscard]] Value apply_filter(Work& work, const std::string& name, const Value& value, Arguments& arguments);
[[nodiscard]] bool apply_test(Work& work, const std::string& name, const Value& value, Arguments& arguments);
[[nodiscard]] std::string lower_case(std::string_view text);
[[nodiscard]] std::string word_titled(std::string_view text);  ///< the filter "title", which is not the method
/// Throws Fault for a generator, of which Python has no such thing.
void require_list(const List& list, const char* what);
[[nodiscard]] std::vector<std::string> split_lines(std::string_view text);

}  // namespace emend::models::detail::jinja
