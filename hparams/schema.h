// The one declaration of an editor's hyper-parameters.
//
//   struct MemitHparams : LocateHparams { double mom2_update_weight = 15000; };
//   const Schema<MemitHparams>& memit_schema() {
//     static const auto schema = Schema<MemitHparams>("memit")
//         .include(locate_schema())
//         .field("mom2_update_weight", &MemitHparams::mom2_update_weight,
//                {.meaning = "weight of the old keys", .formula = "λ in λC + KKᵀ", .min = 0});
//     return schema;
//   }
//   MemitHparams h = memit_schema().parse(load_hparams(path), log);
//
// Parsing, defaults, range checks, the dump in reports and the table in the docs derive from it. Defaults are the
// member initialisers of the struct. Unknown, missing, ill-typed and out-of-range keys are errors with file:line.
//
// Field types: bool, int64_t, double, std::string, std::vector of int64_t, double or std::string,
// std::vector<std::vector<int64_t>>, and std::optional of the four scalars (null, none and false mean "absent").
#pragma once

#include <emend/core/log.h>
#include <emend/core/mapped.h>
#include <emend/hparams/raw.h>

#include <concepts>
#include <cstdint>
#include <optional>

namespace emend::hparams {

/// Everything about a field but its name, type and default.
struct FieldOptions {
  std::string meaning = {};  ///< for people, one line, no full stop
  std::string formula = {};  ///< the paper's formula or section
  bool required = false;
  std::optional<double> min = {};         ///< inclusive; holds for every item of a list
  std::optional<double> max = {};         ///< inclusive
  std::optional<double> above = {};       ///< exclusive lower bound: {.above = 0} means positive
  std::vector<std::string> one_of = {};   ///< the strings that are allowed
  int64_t min_items = 0;                  ///< for lists
  std::vector<std::string> aliases = {};  ///< other names that files use
};

/// What programs, docs and tests see of a field.
struct FieldInfo {
  std::string name;
  std::string type;          ///< "number", "integer", "list of integers", "number or none", …
  std::string default_text;  ///< as it would stand in a YAML file
  FieldOptions options;
};

namespace detail {

/// Each returns what was expected if `raw` does not fit, else an empty text. Overload set of all field types.
std::string read_value(const RawValue& raw, const FieldOptions& options, bool& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, int64_t& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, double& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, std::string& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<int64_t>& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<double>& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<std::string>& out);
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<std::vector<int64_t>>& out);
/// Null, "none" and, but for flags, "false".
bool is_absent(const RawValue& raw, bool flag);
template <class V>
std::string read_value(const RawValue& raw, const FieldOptions& options, std::optional<V>& out) {
  if (is_absent(raw, std::is_same_v<V, bool>)) {
    out.reset();
    return "";
  }
  V value{};
  const std::string refusal = read_value(raw, options, value);
  if (!refusal.empty()) return refusal + ", or none";
  out = std::move(value);
  return "";
}

/// What the range or the choices of a field are: "of at least 0", "from 0 to 1", "one of a, b", or empty.
std::string limits_text(const FieldOptions& options);

/// "number", "list of integers", "string or none".
template <class V>
std::string type_name() {
  if constexpr (requires(V value) { value.reset(); }) return type_name<typename V::value_type>() + " or none";
  if constexpr (std::is_same_v<V, bool>) return "true or false";
  if constexpr (std::is_same_v<V, int64_t>) return "integer";
  if constexpr (std::is_same_v<V, double>) return "number";
  if constexpr (std::is_same_v<V, std::string>) return "string";
  if constexpr (std::is_same_v<V, std::vector<int64_t>>) return "list of integers";
  if constexpr (std::is_same_v<V, std::vector<double>>) return "list of numbers";
  if constexpr (std::is_same_v<V, std::vector<std::string>>) return "list of strings";
  return "list of lists of integers";
}

/// A field with its struct's type erased.
struct ErasedField {
  FieldInfo info;
  std::function<void*(void* object)> place;  ///< of the value in the struct of the schema that holds the field
  std::string (*read)(const RawValue& raw, const FieldOptions& options, void* value);
  nlohmann::json (*write)(const void* value);  ///< the inverse of read, for dump()
};
struct ErasedCheck {
  std::string field;
  std::function<std::string(void* object)> test;
};
template <class V>
ErasedField erased_field(std::string name, FieldOptions options, std::function<void*(void*)> place) {
  const auto read = [](const RawValue& raw, const FieldOptions& rules, void* value) {
    return read_value(raw, rules, *static_cast<V*>(value));
  };
  const auto write = [](const void* value) {
    const V& v = *static_cast<const V*>(value);
    if constexpr (requires { v.has_value(); })
      return v ? nlohmann::json(*v) : nlohmann::json();
    else
      return nlohmann::json(v);
  };
  return {{std::move(name), type_name<V>(), "", std::move(options)}, std::move(place), read, write};
}

/// The part of a schema that does not depend on the struct.
struct ErasedSchema {
  std::string editor;
  std::vector<ErasedField> fields;
  std::vector<ErasedCheck> checks;
  std::vector<std::pair<std::string, std::string>> unused;  ///< known keys without effect, and why

  /// `defaults` is a struct of the schema as it is made.
  void add(ErasedField field, void* defaults);
  void parse(void* object, const RawHparams& raw, const Log& log) const;
  [[nodiscard]] nlohmann::json dump(const void* object) const;
  /// `part` turns a pointer to a struct of the schema into one to a struct of the other.
  void include(const ErasedSchema& other, const std::function<void*(void*)>& part, void* defaults);
};

}  // namespace detail

/// The fields of T. Build once, keep as a function-local static (it is immutable and holds no model state).
template <class T>
class Schema {
 public:
  /// `editor` names the schema in messages; fields of bases come in through include().
  explicit Schema(std::string editor) { erased_.editor = std::move(editor); }

  template <class V, class C>  ///< declares one field
  requires std::derived_from<T, C> Schema& field(const std::string& name, V C::*member, FieldOptions options) {
    T defaults{};
    erased_.add(detail::erased_field<V>(name, std::move(options), place_of(member)), &defaults);
    return *this;
  }
  template <class V, class C, std::convertible_to<std::string> Text>  ///< the same with its meaning in front
  Schema& field(const std::string& name, V C::*member, const Text& meaning, FieldOptions options = {}) {
    options.meaning = meaning;
    return field(name, member, std::move(options));
  }

  /// Takes over the fields and checks of a base's schema. The defaults shown are those of T.
  template <class B>
  requires std::derived_from<T, B> Schema& include(const Schema<B>& base) {
    T defaults{};
    erased_.include(
        base.erased(), [](void* object) -> void* { return static_cast<B*>(static_cast<T*>(object)); }, &defaults);
    return *this;
  }
  /// Takes over the fields and checks of a member's schema; its keys stay flat in the file.
  template <class M, class C>
  requires std::derived_from<T, C> Schema& include(const Schema<M>& part, M C::*member) {
    T defaults{};
    erased_.include(part.erased(), place_of(member), &defaults);
    return *this;
  }

  /// A key that published files carry and this editor reads without effect; named in the one warning.
  Schema& unused(std::string name, std::string why) {
    erased_.unused.emplace_back(std::move(name), std::move(why));
    return *this;
  }
  /// A rule over several fields: returns what is expected if it does not hold, else nothing. `field` gives the line.
  Schema& check(std::string field, std::function<std::string(const T&)> test) {
    erased_.checks.push_back({std::move(field), [test = std::move(test)](const void* object) {
                                return test(*static_cast<const T*>(object));
                              }});
    return *this;
  }

  /// A rule with one answer: what is expected where it does not hold.
  Schema& check(std::string field, std::string expected, std::function<bool(const T&)> holds) {
    return check(std::move(field), [expected = std::move(expected), holds = std::move(holds)](const T& value) {
      return holds(value) ? std::string() : expected;
    });
  }

  /// Typed values, defaults where the file is silent. Throws Error(kInvalidArgument) with file:line, the value, what
  /// was expected and "did you mean". Machine settings (hparams/machine.h) are left out with one warning.
  [[nodiscard]] T parse(const RawHparams& raw, const Log& log = {}) const {
    T result{};
    erased_.parse(&result, raw, log);
    return result;
  }
  /// All fields with effective values, as reports store them; parse(parse_hparams(dump().dump(), …)) gives them back.
  [[nodiscard]] nlohmann::json dump(const T& value) const { return erased_.dump(&value); }
  [[nodiscard]] std::vector<FieldInfo> fields() const { return mapped(erased_.fields, &detail::ErasedField::info); }
  [[nodiscard]] const detail::ErasedSchema& erased() const noexcept { return erased_; }

 private:
  template <class Member>
  static auto place_of(Member member) {
    return [member](void* object) -> void* { return &(static_cast<T*>(object)->*member); };
  }

  detail::ErasedSchema erased_;
};

}  // namespace emend::hparams
