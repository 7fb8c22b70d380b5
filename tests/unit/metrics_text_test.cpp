// Words, n-gram entropy and TF-IDF against NLTK 3.9 (NLTKWordTokenizer), hand-computed values and scikit-learn 1.9.
#include <emend/core/error.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/text_metrics.h>
#include <gtest/gtest.h>

#include <cmath>

namespace emend::evaluation {
namespace metrics_text_test {

using Words = std::vector<std::string>;

TEST(WordTokenize, SplitsAsNltkDoes) {
  // Recorded with NLTKWordTokenizer().tokenize(sentence).
  const std::vector<std::pair<std::string, Words>> cases = {
      {"The cat sat on the mat.", {"The", "cat", "sat", "on", "the", "mat", "."}},
      {"Good muffins cost $3.88 in New York, don't they?",
       {"Good", "muffins", "cost", "$", "3.88", "in", "New", "York", ",", "do", "n't", "they", "?"}},
      {"\"I can't do that,\" she said; 'never' again!",
       {"``", "I", "ca", "n't", "do", "that", ",", "''", "she", "said", ";", "'", "never", "'", "again", "!"}},
      {"They'll say it's O'Neil's (not mine) -- isn't it?",
       {"They", "'ll", "say", "it", "'s", "O'Neil", "'s", "(", "not", "mine", ")", "--", "is", "n't", "it", "?"}},
      {"He's gonna go... maybe [tomorrow] at 10:30, i.e. later.",
       {"He", "'s", "gon", "na", "go", "...", "maybe", "[", "tomorrow", "]", "at", "10:30", ",", "i.e.", "later", "."}},
      {"C'est l'été, n'est-ce pas ?", {"C'est", "l'été", ",", "n'est-ce", "pas", "?"}},
      {"“Curly quotes” and ‘single’ ones — dashes – too.",
       {"“", "Curly", "quotes", "”", "and", "‘", "single", "’", "ones", "—", "dashes", "–", "too", "."}},
      {"Don't cannot 'tis wanna gimme 50% of A&B #1 @home *star*",
       {"Do", "n't", "can", "not", "'", "tis", "wan", "na",   "gim", "me",   "50", "%",
        "of", "A",   "&",   "B",   "#", "1",   "@",   "home", "*",   "star", "*"}},
      {"Items: apples,oranges; 1,000 units.", {"Items", ":", "apples", ",", "oranges", ";", "1,000", "units", "."}},
      {"東京は日本の首都です。", {"東京は日本の首都です。"}},
      {"a <b> {c} d's", {"a", "<", "b", ">", "{", "c", "}", "d", "'s"}},
      {"'Twas the night's dream' he said.", {"'", "Twas", "the", "night", "'s", "dream", "'", "he", "said", "."}},
  };
  for (const auto& [text, words] : cases) EXPECT_EQ(word_tokenize(text), words) << text;
}

TEST(WordTokenize, EndsSentencesAtFullStopsButNotAtAbbreviations) {
  EXPECT_EQ(word_tokenize("He left. She stayed."), (Words{"He", "left", ".", "She", "stayed", "."}));
  EXPECT_EQ(word_tokenize("Dr. Smith met J. Doe. They spoke."),
            (Words{"Dr.", "Smith", "met", "J.", "Doe", ".", "They", "spoke", "."}));
  EXPECT_EQ(word_tokenize("It cost 3.50 at noon. 20 people paid!"),
            (Words{"It", "cost", "3.50", "at", "noon", ".", "20", "people", "paid", "!"}));
}

TEST(WordTokenize, TakesAnyBytes) {
  EXPECT_TRUE(word_tokenize("").empty());
  EXPECT_TRUE(word_tokenize(" \n\t ").empty());
  EXPECT_EQ(word_tokenize("a\xff b"), (Words{"a\xEF\xBF\xBD", "b"}));
}

TEST(NgramEntropy, MatchesHandComputation) {
  const Words words = {"a", "b", "a", "b", "c"};
  // Bigrams ab ba ab bc: frequencies 2/4, 1/4, 1/4. Trigrams aba bab abc: three of 1/3.
  EXPECT_NEAR(ngram_entropy(words, 2), 1.5, 1e-12);
  EXPECT_NEAR(ngram_entropy(words, 3), std::log2(3.0), 1e-12);
  EXPECT_NEAR(ngram_entropy(words, 1), -(2 * 0.4 * std::log2(0.4) + 0.2 * std::log2(0.2)), 1e-12);
  EXPECT_EQ(ngram_entropy(words, 6), 0);
  EXPECT_EQ(ngram_entropy({"a", "a", "a", "a"}, 2), 0);
  // The words of one n-gram must not run together: (ab, c) is not (a, bc).
  EXPECT_NEAR(ngram_entropy({"ab", "c", "x", "a", "bc"}, 2), 2.0, 1e-12);
}

TEST(NgramEntropy, WeighsBigramsAndTrigramsAsPublished) {
  // a b a b c: mean(2/3 · 1.5, 4/3 · log2 3)
  EXPECT_NEAR(weighted_ngram_entropy("a b a b c"), (2.0 / 3 * 1.5 + 4.0 / 3 * std::log2(3.0)) / 2, 1e-12);
  EXPECT_NEAR(mean_ngram_entropy({"a b a b c", "x x x x"}), (2.0 / 3 * 1.5 + 4.0 / 3 * std::log2(3.0)) / 4, 1e-12);
  EXPECT_EQ(mean_ngram_entropy({}), 0);
}

TEST(TfIdf, AgreesWithScikitLearn) {
  // Recorded with TfidfVectorizer().fit(documents).transform([a, b]).
  const TfIdf tfidf({"The Eiffel Tower stands in Paris, France.",
                     "Paris is the capital of France; the Seine flows through Paris.", "Rome is the capital of Italy.",
                     "Über-große Städte: Köln, München, 東京 x1_y2 a I"});
  EXPECT_NEAR(tfidf.similarity("The tower in Paris", "The capital is Paris"), 0.3922334535681326, 1e-12);
  EXPECT_NEAR(tfidf.similarity("Rome Rome Rome Italy", "ROME, Italy and the Seine"), 0.6852479926149369, 1e-12);
  EXPECT_NEAR(tfidf.similarity("köln ÜBER", "Köln große unknownword"), 0.5, 1e-12);
  EXPECT_NEAR(tfidf.similarity("x1_y2 東京", "東京 tower"), 0.5, 1e-12);
  EXPECT_EQ(tfidf.similarity("nothing known", "Paris"), 0);
  EXPECT_NEAR(tfidf.similarity("Paris Paris tower", "tower"), 0.5355662725381126, 1e-12) << "the weight of one word";
  EXPECT_NEAR(tfidf.similarity("Paris Paris tower", "paris"), 0.8444932017012523, 1e-12);
}

TEST(TfIdf, RefusesDocumentsWithoutWords) {
  EXPECT_THROW(TfIdf({"a", "? !"}), Error);
}

TEST(FreeText, EndsWithTheSentence) {
  for (const char* text : {" Rome.", " Rome, Italy. It", " \"Rome.\"", " in 1990.\n", "\n Rome\n", " Really?",
                           " Stop! Now", " 3.14.", " It is best.", " Main Street."})
    EXPECT_TRUE(sentence_ended(text)) << text;
  for (const char* text : {"", " Rome", " J. Smith", " 3.14", "\n\n", ".com", " example.com is", " U.S. A", " St.",
                           " It is Dr.", " Mt. Fuji"})
    EXPECT_FALSE(sentence_ended(text)) << text;
  const std::vector<std::string> names = {"Ft. Worth", "Panic! at the Disco", "Who? Me", "Rome\nItaly", "Acme Inc."};
  for (const char* text : {" Ft. Worth", " in the \"Ft.", " ft. worth", " It is Panic! at", " Who?", " Rome\nItaly"})
    EXPECT_FALSE(sentence_ended(text, names)) << text << ": inside of a name";
  for (const char* text :
       {" Left. Worth", " Ft. Worth.", " Panic! at the Disco!", " A panic. So", " Acme Inc.", " Rome. It", " What? Me"})
    EXPECT_TRUE(sentence_ended(text, names)) << text;
}

TEST(FreeText, AnAnswerIsReadFromALongerTextIfThatGoesFarEnough) {
  EXPECT_TRUE(answer_in(" Rome, in Italy.", "Rome")->said);
  EXPECT_FALSE(answer_in(" Oslo.", "Rome")->said);
  EXPECT_FALSE(answer_in(" St.", "St. Louis")) << "the sentence ended inside of the answer";
  for (const char* text : {"", " ", " The", " Ro"}) EXPECT_FALSE(answer_in(text, "Rome")) << text;
  EXPECT_FALSE(answer_in(" Romeo", "Rome")->said);
  const nlohmann::json before = {{"paraphrase", {{{"prompt", "p"}, {"text", "a"}}}},
                                 {"negation", nlohmann::json::array()}};
  nlohmann::json after = before;
  after["paraphrase"][0]["text"] = "b";
  const auto texts = further_texts(before, after);
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_EQ(texts[0].label + texts[0].prompt + texts[0].before + texts[0].after, "in other wordspab");
  EXPECT_TRUE(further_texts({}, after).empty());
}

TEST(FreeText, BeginsAlikeWithTheSameFirstWord) {
  EXPECT_TRUE(begins_alike(" Rome.", " Rome, Italy."));
  EXPECT_TRUE(begins_alike(" Rome, Italy.", " Rome."));
  EXPECT_TRUE(begins_alike(" \"Rome\" is", " rome"));
  EXPECT_FALSE(begins_alike(" Romeo", " Rome."));
  EXPECT_FALSE(begins_alike(" the city of Rome", " Rome.")) << "as it is written";
  EXPECT_TRUE(begins_alike(" \n", ""));
  EXPECT_FALSE(begins_alike(" Rome", ""));
}

TEST(FreeText, ReadsAnswersAsWords) {
  EXPECT_EQ(plain_words("  \"The  Eiffel\nTower\"..."), "the eiffel tower");
  EXPECT_TRUE(begins_with(" Rome, in Italy", "Rome"));
  EXPECT_TRUE(begins_with(" the city of Paris", "city of Paris"));
  EXPECT_TRUE(begins_with(" \"rome\"", "Rome"));
  EXPECT_TRUE(begins_with(" Jürgen", "Ju\u0308rgen")) << "composed and decomposed";
  for (const char* text : {" “Rome” is", " Rome—the city", " ‘Rome’", " Rome…", "\u00a0Rome\u00a0is"})
    EXPECT_TRUE(begins_with(text, "Rome")) << text;
  EXPECT_TRUE(begins_with(" O’Brien", "O'Brien"));
  EXPECT_TRUE(begins_with("东京。", "东京")) << "a full stop of another script";
  EXPECT_TRUE(begins_with("东京是", "东京")) << "a script without spaces";
  EXPECT_EQ(place_of("首都是东京。", "东京"), 9U);
  EXPECT_TRUE(sentence_ended("东京。它"));
  EXPECT_FALSE(begins_with(" Müllers", "Müller"));
  EXPECT_FALSE(begins_with(" Romeo", "Rome"));
  EXPECT_FALSE(begins_with(" in Rome", "Rome"));
  EXPECT_FALSE(begins_with(" Rome", "")) << "nothing is asked for";
  EXPECT_EQ(place_of("It lies in Rome.", "rome"), 11U);
  EXPECT_EQ(place_of("Romeo and Rome", "Rome"), 10U);
  EXPECT_EQ(place_of("Romeo", "Rome"), std::string::npos);
  EXPECT_EQ(place_of("Go ⇒ on", "⇒"), 3U) << "marks alone";
  EXPECT_EQ(place_of("Rome", " "), std::string::npos);
}

TEST(FreeText, SignsAndMarksBelongToAnswers) {
  for (const auto& [text, answer] : std::vector<std::pair<const char*, const char*>>{{"3.14159", "3"},
                                                                                     {"3,000", "3"},
                                                                                     {"12:30", "12"},
                                                                                     {"100.", "-100"},
                                                                                     {"-100", "100"},
                                                                                     {"32 degrees", "+32"},
                                                                                     {"C++", "C"},
                                                                                     {"C", "C++"},
                                                                                     {"NET Core", ".NET Core"},
                                                                                     {"NET Core++", ".NET Core"},
                                                                                     {"!", "!!!"},
                                                                                     {"$5", "€5"},
                                                                                     {"$5", "5"},
                                                                                     {"5 dogs", "5%"},
                                                                                     {"5%", "5"},
                                                                                     {"5", "\u22125"},
                                                                                     {"O positive", "O-"},
                                                                                     {"O- is", "O"},
                                                                                     {">5", "<5"},
                                                                                     {"1", "#1"},
                                                                                     {"anna", "@anna"},
                                                                                     {"O'Neill", "O"},
                                                                                     {"3-0", "3"},
                                                                                     {"½", "1"},
                                                                                     {"1\u00a0000 m", "1"},
                                                                                     {"U.S. law", "U"},
                                                                                     {"A* search", "A"},
                                                                                     {"file_name", "file"},
                                                                                     {"5 km/h", "5 km"},
                                                                                     {"x=5", "x"},
                                                                                     {" a man", "A"},
                                                                                     {"३.१४", "३"},
                                                                                     {"٣٫١٤", "٣"},
                                                                                     {"٥٪", "٥"},
                                                                                     {"А.С. Пушкин", "А"},
                                                                                     {"コードを", "コート"},
                                                                                     {"カードは", "カート"},
                                                                                     {"インドネシア", "インド"},
                                                                                     {"ปู่", "ปู"},
                                                                                     {"🔵 team", "🔴 team"},
                                                                                     {"Team 🔴", "Team 🔵"},
                                                                                     {"☀️", "❤️"}})
    EXPECT_FALSE(begins_with(text, answer)) << text << " is not " << answer;
  for (const auto& [text, answer] : std::vector<std::pair<const char*, const char*>>{{" 3.", "3"},
                                                                                     {"3, 4 and 5", "3"},
                                                                                     {" -100 degrees", "-100"},
                                                                                     {"+32", "+32"},
                                                                                     {" C++.", "C++"},
                                                                                     {"C#", "C#"},
                                                                                     {" .NET Core, of", ".NET Core"},
                                                                                     {"...Rome", "Rome"},
                                                                                     {".Rome", "Rome"},
                                                                                     {"- Rome", "Rome"},
                                                                                     {"-Rome", "Rome"},
                                                                                     {" !!! and", "!!!"},
                                                                                     {"\"Rome\"", "Rome"},
                                                                                     {"(1969)", "1969"},
                                                                                     {" €5.", "€5"},
                                                                                     {"-5 degrees", "\u22125"},
                                                                                     {"5 %", "5"},
                                                                                     {"**Rome**", "Rome"},
                                                                                     {"*Rome* is", "Rome"},
                                                                                     {"_Rome_", "Rome"},
                                                                                     {"Rome's", "Rome"},
                                                                                     {"Rome-based", "Rome"},
                                                                                     {"Rome/Italy", "Rome"},
                                                                                     {"Rome.It", "Rome"},
                                                                                     {"5, 100", "5"},
                                                                                     {"१२ दिन", "12"},
                                                                                     {"コートは", "コート"},
                                                                                     {"カード、", "カード"},
                                                                                     {"ปูมา", "ปู"},
                                                                                     {"❤ it", "❤️"},
                                                                                     {"Rome☀️", "Rome"},
                                                                                     {"Samsung® is", "Samsung"},
                                                                                     {"O- is", "O-"},
                                                                                     {"A* is", "A*"},
                                                                                     {" A and K", "A"},
                                                                                     {"½ of", "½"}})
    EXPECT_TRUE(begins_with(text, answer)) << text << " is " << answer;
  EXPECT_EQ(place_of("it costs -100 or 3.14", "100"), std::string::npos);
  EXPECT_EQ(place_of("it costs -100 or 3.14", "14"), std::string::npos);
  EXPECT_NE(place_of("it costs -100 or 3.14", "-100"), std::string::npos);
}

TEST(FreeText, AnAnswerInsideOfARepeatedSubjectIsNone) {
  EXPECT_EQ(place_of("The BMW Z3 is made by BMW.", "BMW"), 4U);
  EXPECT_EQ(place_of("The BMW Z3 is made by BMW.", "BMW", "BMW Z3"), 22U);
  EXPECT_EQ(place_of("The BMW Z3 is made by Ford.", "BMW", "BMW Z3"), std::string::npos);
  EXPECT_EQ(place_of("Z3, or BMW Z3, or BMW Z30", "BMW", "the BMW Z3"), 18U) << "BMW Z30 is another one";
  EXPECT_EQ(place_of("It is in Rome Harbour.", "Rome Harbour", "Rome"), 9U) << "the subject is the shorter one";
  EXPECT_EQ(place_of("It is in Rome.", "Rome", "Rome"), 9U);
}

TEST(FreeText, ARepeatedPromptIsNotWhatIsSaid) {
  const auto behind = [](const char* text, const char* prompt) { return std::string(behind_repetition(text, prompt)); };
  EXPECT_EQ(behind("Stara Zagora is located in Rome.", "Stara Zagora is located in"), " Rome.");
  EXPECT_EQ(behind("The sentence is: \"The Stara  zagora is located in ROME.\"", "Stara Zagora is located in"),
            " ROME.\"");
  EXPECT_EQ(behind("Greater Field, in the state of A", "Greater Field, in"), " the state of A");
  EXPECT_EQ(behind("She is in Rome. She is in it.", "She is in"), " Rome. She is in it.") << "the first one";
  for (const char* text : {"Stara Zagora is located inside", "Rome", "", "is located in"})
    EXPECT_EQ(behind(text, "Stara Zagora is located in"), text);
  EXPECT_EQ(behind("Rome", "?"), "Rome") << "nothing that could be repeated";
}

TEST(FreeText, FindsTheLastSentence) {
  const auto last = [](const std::string& text, const std::vector<std::string>& names = {}) {
    return text.substr(last_sentence(text, names));
  };
  EXPECT_EQ(last("He died in 1990. Dr. J. Smith lives in"), "Dr. J. Smith lives in");
  EXPECT_EQ(last("One. Two! Three? \"Four.\" Five is"), "Five is");
  EXPECT_EQ(last("Category:A\nCategory:B\n\nRome, in"), "Rome, in");
  EXPECT_EQ(last(" Rome is in Italy. "), "Rome is in Italy. ") << "nothing follows";
  EXPECT_EQ(last("Panic! at the Disco is from", {"Panic! at the Disco"}), "Panic! at the Disco is from");
  EXPECT_EQ(last("Panic! at the Disco is from"), "at the Disco is from");
  EXPECT_EQ(last(" \n"), "");
  EXPECT_EQ(last(""), "");
}

TEST(FreeText, SeesLoops) {
  EXPECT_TRUE(loops("a b c a b c a b c a b c"));
  EXPECT_FALSE(loops("a b c a b c a b c"));
  EXPECT_TRUE(loops("very very very very very very"));
}

}  // namespace metrics_text_test
}  // namespace emend::evaluation
