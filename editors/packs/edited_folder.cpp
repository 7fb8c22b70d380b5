// Model folders that are written edited: the model, and its ledger beside it.
#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>

namespace emend::editors {

void copy_model_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  (void)models::open_checkpoint(from.string());  // refuses links that lead out of the folder
  const auto copy = [](const std::filesystem::path& source, const std::filesystem::path& target) {
    std::filesystem::create_directories(target);
    for (const auto& entry : std::filesystem::directory_iterator(source))
      if (entry.is_regular_file() && entry.path().filename().string().find(".tmp-") == std::string::npos)
        clone_file(entry.path(), target / entry.path().filename());
  };
  copy(from, to);
  for (const char* part : {".emend", ".emend/packs", models::kMoreTemplates})
    if (std::filesystem::is_directory(from / part)) copy(from / part, to / part);
}

void write_edited_folder(const std::filesystem::path& to,
                         const std::function<void(const std::filesystem::path&)>& write,
                         const std::function<void(Ledger&)>& change, bool replace, const Log& log,
                         const std::filesystem::path& from) {
  std::error_code error;
  if (!replace && std::filesystem::exists(to, error) && !std::filesystem::is_empty(to, error))
    refuse({to.string(), "the folder exists and is not empty", "a new or empty folder", "choose another"});
  const auto fill = [&](const std::filesystem::path& staged) {
    write(staged);
    try {
      Ledger ledger(staged, log);
      change(ledger);
    } catch (const Error& error) {
      const bool of_the_copied =
          error.error_class() == ErrorClass::kInvalidArgument || error.error_class() == ErrorClass::kCorruption;
      throw of_the_copied && !from.empty() ? renamed(error, staged, from) : error;
    }
  };
  write_whole(to, fill, models::is_model_file);
}

}  // namespace emend::editors
