// The tree of a parsed template.
#pragma once

#include <emend/models/detail/jinja_value.h>

namespace emend::models::detail::jinja {

enum class Kind {
  kNothing,    // what is left out: no filter of a loop, no default of a parameter
  kLiteral,    // value
  kName,       // name
  kList,       // kids
  kTuple,      // kids; also a target
  kDict,       // keys and values in turn
  kAttribute,  // kids[0].name
  kIndex,      // kids[0][kids[1]]
  kSlice,      // kids[0][kids[1]:kids[2]:kids[3]]
  kCall,       // kids[0](kids…, named…)
  kFilter,     // kids[0] | name(kids…, named…)
  kTest,       // kids[0] is name(kids…, named…)
  kNot,
  kNegate,
  kPlus,
  kBinary,   // kids[0] name kids[1]
  kCompare,  // kids[0], then named: operators and what they compare with
  kAnd,
  kOr,
  kChoice,  // kids[0] if kids[1] else kids[2]
  // Statements
  kBlock,     // kids
  kScope,     // kids[0], with its own variables
  kText,      // value
  kPrint,     // kids[0]
  kIf,        // condition, block, condition, block, …, block
  kFor,       // target, what, filter, block, block for else
  kSet,       // target, expression
  kSetBlock,  // target, block, expression of kCaptured
  kMacro,     // name, named: parameters and defaults, kids[0]: block
  kBreak,
  kContinue,
};

/// The name under which the expression of a kSetBlock finds the block's text.
inline constexpr const char* kCaptured = "(block)";

struct Node {
  Kind kind = Kind::kNothing;
  int line = 0;
  std::string name = {};
  Value value = {};
  std::vector<Node> kids = {};
  std::vector<std::pair<std::string, Node>> named = {};
  int depth = 1;
};

struct Token {
  enum Type { kData, kBlockBegin, kBlockEnd, kPrintBegin, kPrintEnd, kName, kText, kWhole, kReal, kOperator, kEnd };
  Type type = kEnd;
  std::string text;
  int line = 1;
};

/// What ends a parse, with its line.
struct SyntaxFault {
  int line;
  std::string what;
};

[[nodiscard]] std::vector<Token> tokens_of(std::string_view source);
[[nodiscard]] Node parse(std::string_view source);

}  // namespace emend::models::detail::jinja
