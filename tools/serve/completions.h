// OpenAI's completions and chat completions: requests read, answers written, streamed or whole.
#pragma once

#include <emend/models/chat.h>

#include <optional>

#include "engine.h"
#include "http.h"

namespace emend::tools::serve {

struct CompletionLimits {
  int64_t max_tokens = 4096;  ///< of one answer
  int64_t timeout_s = 300;    ///< from the request to the end of its answer
  std::string chat_format;    ///< how turns are written; empty: told by the model's template
};

class Completions {
 public:
  /// `beside`: of the model's own folder; must outlive this.
  Completions(Engine& engine, const PackFolder& packs, std::string base, CompletionLimits limits,
              const editors::RuntimeScope& beside);

  [[nodiscard]] Reply models() const;
  [[nodiscard]] nlohmann::ordered_json model(const std::string& id) const;
  [[nodiscard]] Reply complete(const Request& request, bool chat);
  /// "BASE+anna+ben" as a set of packs; "BASE" alone is what is in force, "BASE+" no pack at all. Throws HttpError 404.
  [[nodiscard]] PackSet packs_of(const std::string& model) const;
  /// Text that edits beside the weights (IKE) put in front of a prompt: the model's own folder's, then the packs'.
  [[nodiscard]] std::string prefix(const PackSet& packs, const std::string& prompt) const;
  [[nodiscard]] const std::string& base() const noexcept { return base_; }
  /// Seconds from request to first token: their sum, and how many.
  [[nodiscard]] std::pair<double, int64_t> first_tokens() const;

 private:
  struct Asked;
  [[nodiscard]] Asked read(const nlohmann::json& request, bool chat) const;
  [[nodiscard]] std::vector<std::vector<int64_t>> prompts(const nlohmann::json& request, const PackSet& packs,
                                                          bool chat) const;
  [[nodiscard]] models::ChatFormat chat_format() const;
  void start(Asked& asked);
  void stream(const Asked& asked, const Write& write);
  [[nodiscard]] nlohmann::ordered_json whole(const Asked& asked);
  [[nodiscard]] nlohmann::ordered_json log_probs(const Asked& asked, const Piece& piece, size_t& offset) const;
  void note(const Asked& asked);

  Engine& engine_;
  const PackFolder& packs_;
  const std::string base_;
  const CompletionLimits limits_;
  const editors::RuntimeScope& beside_;
  const int64_t created_;
  mutable std::mutex mutex_;
  mutable std::optional<models::ChatFormat> format_;
  double first_seconds_ = 0;
  int64_t first_count_ = 0, number_ = 0;
};

}  // namespace emend::tools::serve
