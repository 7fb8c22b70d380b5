#include <emend/models/tokenizer/detail/added_tokens.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word(decode_utf8(text.data() + last_character(text)));
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word(decode_utf8(text.data()));
}

}  // namespace

uint32_t AddedTokenSearch::step(uint32_t node, char byte) const {
  for (uint32_t child = nodes_[node].child; child != 0; child = nodes_[child].sibling)
    if (nodes_[child].byte == byte) return child;
  return 0;
}

void AddedTokenSearch::add(std::string_view pattern, const AddedToken& token) {
  if (pattern.empty()) return;
  uint32_t node = 0;
  for (const char byte : pattern) {
    uint32_t child = step(node, byte);
    if (child == 0) {
      child = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back({0, nodes_[node].child, -1, byte});
      nodes_[node].child = child;
      if (node == 0) roots_[static_cast<unsigned char>(byte)] = child;
    }
    node = child;
  }
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

const AddedToken* AddedTokenSearch::longest(std::string_view text, size_t at, size_t& end) const {
  int32_t best = -1;
  uint32_t node = roots_[static_cast<unsigned char>(text[at])];
  for (size_t next = at + 1; node != 0; ++next) {
    if (nodes_[node].token >= 0) {
      best = nodes_[node].token;
      end = next;
    }
    if (next == text.size()) break;
    node = step(node, text[next]);
  }
  return best < 0 ? nullptr : &tokens_[static_cast<size_t>(best)];
}

void AddedTokenSearch::split(std::string_view text, std::vector<AddedSpan>& spans) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    if (roots_[static_cast<unsigned char>(text[at])] == 0) {
      ++at;
      continue;
    }
    size_t begin = at, end = 0;
    const AddedToken* token = longest(text, at, end);
    if (!token) {
      ++at;
      continue;
    }
    at = end;
    if (token->single_word && (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) continue;
    if (token->lstrip) begin = std::max(white_space_before(text, begin), done);
    if (token->rstrip) end = white_space_after(text, end);
    if (done < begin) spans.push_back({done, begin, nullptr});
    spans.push_back({begin, end, token});
    done = end;
  }
  if (done != text.size()) spans.push_back({done, text.size(), nullptr});
}

}  // namespace emend::models::detail
