// Chat templates: the part of Jinja that Hugging Face's chat templates use, with Python's meaning of values.
//
// Goal: the text that transformers' apply_chat_template gives (its environment: trim_blocks, lstrip_blocks, break and
// continue, raise_exception, strftime_now, tojson without HTML escapes; lists and dicts cannot be changed).
// Non-goals: include, import, extends, call and filter blocks, automatic escaping, formatting with %. What is not
// supported is an error, never another text.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string>
#include <string_view>

namespace emend::models::detail {

namespace jinja {
struct Node;
}

/// A parsed template. Immutable, so that threads may share it; copies share what was parsed.
class Jinja {
 public:
  /// `where` stands for the template in messages.
  /// Throws Error(kUnsupported) with the line for what cannot be parsed, is nested too deeply or larger than 1 MiB.
  explicit Jinja(std::string_view source, std::string where = "chat template");

  /// The text for these variables, an object. Throws Error(kInvalidArgument) with the template's own message where it
  /// calls raise_exception, Error(kUnsupported) with the line for what cannot be computed: an unknown filter, an
  /// attribute of something undefined, more than 2 million steps, a text of more than 16 MiB.
  [[nodiscard]] std::string render(const nlohmann::ordered_json& variables) const;

 private:
  std::string where_;
  std::shared_ptr<const jinja::Node> root_;
};

}  // namespace emend::models::detail
