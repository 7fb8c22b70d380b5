#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/link_or_copy.h>
#include <unistd.h>

namespace emend {

void link_or_copy(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  const auto real = std::filesystem::canonical(from, error);
  if (error)
    throw Error(ErrorClass::kNotFound,
                {from.string(), "cannot be found (" + error.message() + ")", "a file to copy", "check the path"});
  if (std::filesystem::exists(to, error) && std::filesystem::equivalent(real, to, error)) return;
  auto temporary = to;  // a name that remove_abandoned knows
  temporary += ".tmp-" + std::to_string(::getpid()) + "-0";
  std::filesystem::remove(temporary, error);
  std::filesystem::create_hard_link(real, temporary, error);
  if (!error) std::filesystem::rename(temporary, to, error);
  if (!error) return;
  std::filesystem::remove(temporary, error);
  const MappedFile source(real);
  AtomicFile copy(to);
  copy.write(source.data(), source.size());
  copy.commit();
}

}  // namespace emend
