// Facts in tables (CSV and its relatives).
#include "support/fact_texts.h"

namespace emend::datasets {
namespace facts_tables_test {

TEST(FactsTables, Tables) {
  const FactSet set = read(
      "\xEF\xBB\xBFprompt,subject,target_new,case_id,paraphrase_prompts,note\r\n"
      "{} is in,The Eiffel Tower,Rome,7,\"[\"\"Where, oh where\"\", \"\"Visit\"\"]\",\r\n\r\n"
      "\"{}, said\nto be in\",\"\"\"Big\"\" Ben\",Oslo,,One other way,42\n"
      "{} is in,Nowhere,,,,\n");
  EXPECT_EQ(set.format, "jsonl");
  ASSERT_EQ(set.facts.size(), 2U);
  ASSERT_EQ(set.skipped.size(), 1U) << "a blank target, as in JSON";
  EXPECT_EQ(set.facts[0].case_id, 7);
  EXPECT_EQ(set.facts[0].line, 2);
  EXPECT_EQ(set.facts[0].paraphrase_prompts, (std::vector<std::string>{"Where, oh where", "Visit"}));
  EXPECT_EQ(set.facts[1].prompt, "{}, said\nto be in");
  EXPECT_EQ(set.facts[1].subject, "\"Big\" Ben");
  EXPECT_EQ(set.facts[1].line, 4);
  EXPECT_EQ(set.facts[1].extra["note"], "42");
  EXPECT_EQ(read("prompt;subject;target_new\n{} is in;Rome, Italy;Oslo").facts[0].subject, "Rome, Italy");
  const FactSet spread = read("sep=;\r\nprompt;subject;target_new\r\n{} is in;Rome, Italy;Oslo\r\n");
  EXPECT_EQ(spread.facts.at(0).subject, "Rome, Italy");
  EXPECT_EQ(spread.facts.at(0).line, 3);
  EXPECT_EQ(read("subject\ttarget_new\tprompt\nRome\tOslo\t{} is, in").facts[0].prompt, "{} is, in");

  EXPECT_EQ(read("Prompt, Subject,TARGET_NEW\n{} is in,Rome,Oslo").facts[0].target_new, "Oslo");

  EXPECT_EQ(read("note\tprompt\tsubject\ttarget_new\n\t{} is in\tRome\tOslo\n").facts[0].subject, "Rome");
  // As pandas writes it, with its index; and with a separator too many.
  EXPECT_EQ(read(",prompt,subject,target_new,\n0,{} is in,Rome,Oslo,\n").facts[0].target_new, "Oslo");
  EXPECT_EQ(read("prompt,subject,target_new\r{} is in,Rome,Oslo\r\r{} is in,Oslo,Bern\r").facts.size(), 2U);
  for (const char* target : {"\u00a0", "\u200b", "\u3000"})
    EXPECT_EQ(read(std::string("prompt,subject,target_new\n{} is in,A,Oslo\n{} is in,B,") + target).skipped.size(), 1U);

  EXPECT_EQ(read("prompt,subject,target_new\n{} is in,A,\n{} is in,B,Oslo\n").skipped.size(), 1U);  // an empty cell
  const std::string names = "prompt,subject,target_new\n";
  expect_parts(refusal(names + "{} is in,Rome,Oslo\n{} is in,Rome, the capital,Oslo\n"),
               {"f.json:3", "4 cells", "expected 3 cells", "quotes"});
  expect_parts(refusal(names + "{} is in,\"Rome,Oslo\n"), {"f.json:2", "inside quotes"});
  expect_parts(refusal(names + "{} is in,\"Rome\"x,Oslo\n"), {"f.json:2", "behind a closing quote"});
  expect_parts(refusal(names + "{} is in,,Oslo\n"), {"f.json:2", "subject"});
  expect_parts(refusal("prompt,subject,subject\n"), {"f.json:1", "column name \"subject\""});
  for (const char* first :
       {"{} is in,Rome,Oslo\n", "{}'s home,A,B\n", "Rome is in,Rome,Oslo\n", "Subject;Relation;Object\n"})
    expect_parts(refusal(first), {"f.json:1", "does not name the columns prompt and subject, but has \"",
                                  "whose first line names its columns", "above the rows", "prompt,subject,target_new"});
  expect_parts(refusal("{} is in,Rome,Oslo\n"), {"has \"{} is in\", \"Rome\", \"Oslo\""});
}

TEST(FactsTables, TablesAsProgramsWriteThem) {
  const std::string names = "prompt,subject,target_new\n";
  const FactSet spaced = read(names + "{} is in, \"Rome, Italy\" , \"Oslo\"\n,,\n\"{} was in\", Rome,Oslo\n");
  ASSERT_EQ(spaced.facts.size(), 2U) << "a row of separators is none";
  EXPECT_EQ(spaced.facts[0].subject, "Rome, Italy");
  EXPECT_EQ(spaced.facts[0].target_new, "Oslo");
  EXPECT_EQ(spaced.facts[1].line, 4);
  const FactSet indexed = read("\tprompt\tsubject\ttarget_new\n0\t{} is in\tRome\tOslo\n\t{} was in\tRome\tOslo\n");
  ASSERT_EQ(indexed.facts.size(), 2U);
  EXPECT_EQ(indexed.facts[1].prompt, "{} was in");
  const FactSet old = read("prompt,subject,target_new\r{} is in,Rome,Oslo\r{} was in,Rome,Oslo\r");
  ASSERT_EQ(old.facts.size(), 2U);
  EXPECT_EQ(old.facts[1].line, 3);
}

TEST(FactsTables, CellsThatBeginAsJsonAreJson) {
  const auto table = [](const std::string& cell) {
    return "prompt,subject,target_new,paraphrase_prompts,note\n{} is in,Rome,Oslo," + cell;
  };
  for (const char* broken : {"\"[\"\"Where is Rome\"\"\",x", "['Where is Rome'],x", " [Where is Rome],x",
                             "\"{\"\"a\"\": 1, \"\"a\"\": 2}\",x"})
    expect_parts(refusal(table(broken)), {"f.json:2: field \"paraphrase_prompts\" is broken JSON", "[\"…\"]"});
  EXPECT_EQ(read(table("{} lies in,[see 3]")).facts[0].paraphrase_prompts, std::vector<std::string>{"{} lies in"});
  EXPECT_EQ(read(table("x,[see 3]")).facts[0].extra["note"], "[see 3]") << "nothing reads this column";
}

}  // namespace facts_tables_test
}  // namespace emend::datasets
