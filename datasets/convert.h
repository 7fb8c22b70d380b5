// Writing facts, and turning one format into another.
#pragma once

#include <emend/datasets/fact.h>

#include <filesystem>
#include <string>
#include <vector>

namespace emend::datasets {

/// What a conversion did.
struct ConvertReport {
  size_t facts = 0;
  std::string from, to;
  std::vector<std::string> lost;  ///< "attribute_prompts (797 facts)": what the target format has no place for
  bool alt = false;               ///< zsRE rows whose new answer is `alt`: ReadOptions::zsre_target reads them so
};

/// The facts as text: a JSON array with one row a line, or JSON lines for "jsonl". Throws Error(kInvalidArgument) for
/// an unknown format, Error(kUnsupported) for one that cannot be written.
[[nodiscard]] std::string format_facts(const std::vector<Fact>& facts, const std::string& format);

/// What is lost by writing `facts` in `format`: the text is read back and compared member by member.
[[nodiscard]] std::vector<std::string> conversion_losses(const std::vector<Fact>& facts, const std::string& format);

/// Reads `in`, writes `out` atomically in `format`, and warns about what got lost. Groups (MQuAKE, ConflictEdit) become
/// single facts.
ConvertReport convert_facts(const std::filesystem::path& in, const std::filesystem::path& out,
                            const std::string& format, const ReadOptions& options = {}, const Log& log = {});

}  // namespace emend::datasets
