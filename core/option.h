// What a verb can be told, as plain data: the command line, its help, documentation and bindings are made from these
// declarations. Only tools/cli.cpp knows the parser of command lines.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace emend {

/// What stands between the commas of "a,b,c", empty items included.
[[nodiscard]] std::vector<std::string> list_items(const std::string& text);

/// A number of `unit` from 0 on, or the word auto, which stands for `automatic`.
struct CountOrAuto {
  int64_t* value;
  int64_t automatic;
  std::string unit;
};

/// Where the value goes, and its default when the option is declared. A bool is a flag, a vector may be repeated.
using OptionValue = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, std::vector<std::string>*,
                                 std::vector<int>*, std::vector<int64_t>*, std::vector<double>*, CountOrAuto>;

/// Of a number, ends included.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above = false;  ///< `min` itself is not allowed
  bool below = false;  ///< `max` itself is not allowed

  bool operator==(const Limits&) const = default;
};
inline constexpr Limits kNonNegative{.min = 0};
inline constexpr Limits kPositive{.min = 0, .above = true};
inline constexpr Limits kCount{.min = 1};
inline constexpr Limits kCountOrAll{.min = -1};  ///< -1: all

/// What most options leave as it is.
struct OptionForm {
  std::string type = {};  ///< stands for the value in the help, "FILE"; empty: INT, TEXT, … by the value
  std::vector<std::string> choices = {};
  Limits limits = {};
  std::string shown = {};  ///< instead of the default in the help, where that differs from machine to machine
  bool list = false;       ///< a vector also as "a,b,c"
  int digits = 0;          ///< of a text: hexadecimal, at least so many; 0: any text
  bool required = false;
  std::string unless = {};    ///< another option with which it is not required
  int least = 0, most = 0;    ///< of a vector's values; 0: any number
  std::string needs = {};     ///< another option that must be given with it
  std::string excludes = {};  ///< another option that must not
  /// Actions (action_of) that it has an effect on; none: all.
  std::vector<std::string> only = {};
};

struct Option : OptionForm {
  std::string names;    ///< "--seed", "-r,--rank"; without hyphens a positional argument, "FACTS,--facts" is either
  std::string group;    ///< its heading in the help; empty: the first
  std::string meaning;  ///< a line for people
  OptionValue value;

  /// The names one by one.
  [[nodiscard]] std::vector<std::string> spellings() const { return list_items(names); }
  [[nodiscard]] bool is_flag() const noexcept { return std::holds_alternative<bool*>(value); }
  /// Of the value as it is now (the default, until something is parsed): "float32", "0.5", "end,each"; of a flag "".
  [[nodiscard]] std::string text() const;
};

class Options;

/// Options under one heading.
class OptionGroup {
 public:
  OptionGroup(Options& options, std::string heading) : options_(options), heading_(std::move(heading)) {}
  /// `value` must outlive the parsing (Options::arguments).
  OptionGroup& add(std::string names, OptionValue value, std::string meaning, OptionForm form = {});
  /// The same by the name of a field: "batch_size" is "--batch-size", in `needs` and `excludes` too.
  OptionGroup& field(std::string_view name, OptionValue value, std::string meaning, OptionForm form = {});

 private:
  Options& options_;
  std::string heading_;
};

/// The options of one verb in the order of its help.
class Options {
 public:
  /// Options that are added to it stand under this heading.
  OptionGroup group(std::string heading) { return {*this, std::move(heading)}; }
  /// Under the first heading.
  OptionGroup add(std::string names, OptionValue value, std::string meaning, OptionForm form = {}) {
    return group("").add(std::move(names), value, std::move(meaning), std::move(form));
  }
  /// A struct for the values, which lives as long as this object.
  template <class Arguments>
  Arguments& arguments() {
    auto made = std::make_shared<Arguments>();
    kept_.push_back(made);
    return *made;
  }

  [[nodiscard]] const std::vector<Option>& all() const noexcept { return list_; }
  /// By one of its names; null if none was declared.
  [[nodiscard]] const Option* find(const std::string& name) const;
  /// The same; throws std::out_of_range.
  [[nodiscard]] Option& at(const std::string& name);

  std::string footer;  ///< behind the options in the help
  /// A command line that the given one goes on from, once that is parsed: its options count where none are given.
  std::function<std::vector<std::string>()> earlier;

 private:
  friend class OptionGroup;
  std::vector<Option> list_;
  std::vector<std::shared_ptr<void>> kept_;
};

/// What is wrong with one value of an option; nothing if it can be taken. Empty: what shells make of unset variables.
[[nodiscard]] std::string fault_of(const Option& option, const std::string& text);

/// Puts values that can be taken into their place: all of them into a vector, else the first. Of no flag.
void assign(const Option& option, const std::vector<std::string>& values);

/// "v_lr=1 and v_lr=2; give one of them" if the values of a KEY=VALUE option say two things of one key; or nothing.
[[nodiscard]] std::string contradiction(const Option& option);

/// "--max-new-tokens" → "max_new_tokens", "DIR" → "dir".
[[nodiscard]] std::string field_name(const std::string& spelling);
/// What the verb is to do, of the things that it can: the value of the first option with choices that is positional or
/// required. Empty: it does one thing.
[[nodiscard]] std::string action_of(const Options& options);
/// Whether the option does anything for an action.
[[nodiscard]] bool is_of(const Option& option, const std::string& action);
/// Values by field name, as callers without a command line give them. Throws Error(kInvalidArgument) for a name that
/// the action does not have, a required one that is missing, and a value of another type or out of range.
void set_options(const Options& options, const std::string& action, const nlohmann::json& values);

}  // namespace emend
