// Facts files of all formats: whatever is read keeps the promises of the struct.
#include <emend/datasets/fact.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(facts) {
  for (const auto policy : {datasets::BadRowPolicy::kError, datasets::BadRowPolicy::kSkip})
    expect_error_or_success([&] {
      datasets::ReadOptions options;
      options.bad_rows = policy;
      const auto facts = datasets::parse_facts(input, "fuzz.json", options);
      for (const auto& fact : facts.facts) {
        datasets::validate(fact);
        (void)fact.full_prompt();
        (void)datasets::to_json(fact).dump();
      }
      for (const auto& group : facts.groups)
        for (const size_t index : group.facts) (void)facts.facts.at(index);
    });
}

}  // namespace emend::fuzz
