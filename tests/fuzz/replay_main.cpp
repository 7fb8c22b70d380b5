// Replays a corpus without libFuzzer: every kept input, then mutations of them that are the same on every machine.
//
//   fuzz_replay TARGET CORPUS_FOLDER MUTATIONS
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz.h"

namespace {

std::string last_input;  // for the message when a signal or an exception ends the program

void tell() {
  std::fprintf(stderr, "the input was (%zu bytes):", last_input.size());
  for (size_t i = 0; i < std::min<size_t>(last_input.size(), 4096); ++i)
    std::fprintf(stderr, " %02x", static_cast<unsigned char>(last_input[i]));
  std::fprintf(stderr, "\n");
}

// Flips, insertions, deletions, repeats, splices with another input, and numbers that readers stumble over.
std::string mutated(std::string text, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  static const std::vector<std::string> words = {"\"",
                                                 "{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "-1",
                                                 "1e999",
                                                 "null",
                                                 "true",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "18446744073709551615",
                                                 "9223372036854775808",
                                                 "{}",
                                                 "../",
                                                 "\n"};
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  for (size_t steps = 1 + below(4); steps > 0; --steps) {
    const size_t at = below(text.size() + 1), length = 1 + below(8);
    switch (below(8)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text.insert(at, words[below(words.size())]);
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(at, length * 4));
        break;
      case 4:
        text.resize(at);
        break;
      case 5: {
        const auto& other = corpus[below(corpus.size())];
        text.replace(at, length, other.substr(below(other.size() + 1), 1 + below(64)));
        break;
      }
      case 6: {
        static const uint64_t numbers[] = {
            0, 1, 0x7f, 0xff, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};
        const uint64_t number = numbers[below(std::size(numbers))];
        const size_t width = size_t{1} << below(4);
        if (at + width <= text.size()) std::memcpy(text.data() + at, &number, width);
        break;
      }
      default:
        if (at < text.size()) text[at] = static_cast<char>(random());
    }
  }
  text.resize(std::min<size_t>(text.size(), 1 << 16));
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s TARGET CORPUS_FOLDER MUTATIONS\n", argv[0]), 2;
  const auto& targets = emend::fuzz::targets();
  const auto target = std::ranges::find(targets, argv[1], &emend::fuzz::Target::name);
  if (target == targets.end()) return std::fprintf(stderr, "%s: no such target\n", argv[1]), 2;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> corpus;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) return std::fprintf(stderr, "%s: no inputs\n", argv[2]), 1;
  std::set_terminate([] { tell(), std::abort(); });
  std::mt19937_64 random(20240601);
  const long mutations = std::strtol(argv[3], nullptr, 10);
  for (const auto& input : corpus) target->run(last_input = input);
  for (long i = 0; i < mutations; ++i) {
    last_input = mutated(corpus[random() % corpus.size()], corpus, random);
    target->run(last_input);
  }
  std::printf("%zu kept inputs and %ld mutations, no finding\n", corpus.size(), mutations);
  return 0;
}
