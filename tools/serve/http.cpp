#include "http.h"

#include <arpa/inet.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/workflow/run_directory.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "connections.h"

namespace emend::tools::serve {
namespace {

// Of the page: nothing from elsewhere, no script or style but the two files of its own.
constexpr const char* kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; frame-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'";

// Takes as long for a wrong token as for the right one.
bool same_token(const std::string& got, const std::string& wanted) {
  unsigned different = got.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < wanted.size(); ++i)
    different |= static_cast<unsigned char>(wanted[i]) ^ static_cast<unsigned char>(i < got.size() ? got[i] : 0);
  return different == 0;
}

// "localhost:8080" → "localhost", "[::1]:8080" → "::1"
std::string host_of(const std::string& authority) {
  if (authority.starts_with("[")) return authority.substr(1, authority.find(']') - 1);
  return authority.substr(0, authority.find(':'));
}

HttpError to_http(const Error& error) {
  switch (error.error_class()) {
    case ErrorClass::kInvalidArgument:
    case ErrorClass::kCorruption:
    case ErrorClass::kUnsupported:
      return {400, error.what()};
    case ErrorClass::kNotFound:
      return {404, error.what()};
    case ErrorClass::kCancelled:
      return {503, error.what()};
    default:
      return {500, error.what()};
  }
}

void write_error(const HttpError& error, httplib::Response& response) {
  response.status = error.status();
  if (error.status() == 429) response.set_header("Retry-After", "1");
  response.set_content(workflow::dump_json(error.body(), -1), "application/json");
}

}  // namespace

nlohmann::ordered_json HttpError::body() const {
  const char* type = status_ == 401                     ? "authentication_error"
                     : status_ == 429                   ? "rate_limit_error"
                     : status_ == 500 || status_ == 503 ? "server_error"
                                                        : "invalid_request_error";
  const std::string_view text = what();  // "messages[0].role: …" names a field
  const size_t end = std::min(text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.[]"), text.size());
  const bool named = status_ == 400 && end > 0 && text.substr(end, 1) == ":";
  return {{"error",
           {{"message", text},
            {"type", type},
            {"param", named ? nlohmann::ordered_json(text.substr(0, end)) : nlohmann::ordered_json()},
            {"code", code_.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(code_)}}}};
}

void refuse(const std::string& text) {
  throw HttpError(400, text);
}

nlohmann::json Request::json() const {
  const JsonRules rules{.max_depth = 32, .error_class = ErrorClass::kInvalidArgument, .advice = "see /openapi.json"};
  auto document = parse_json(body, "request body", rules);
  if (!document.is_object()) refuse("request body: not an object; expected {…}; see /openapi.json");
  if (const auto fault = schema ? schema_fault(document, *schema) : std::nullopt)
    refuse(fault->where + ": " + fault->got + "; expected " + fault->expected + "; see /openapi.json");
  return document;
}

Reply json_reply(const nlohmann::ordered_json& document, int status) {
  return {.body = workflow::dump_json(document, -1) + "\n", .status = status};
}

std::string event_line(const nlohmann::ordered_json& document) {
  return "data: " + workflow::dump_json(document, -1) + "\n\n";
}

bool is_loopback(const std::string& host) {
  in_addr address{};
  return host == "localhost" || host == "::1" ||
         (::inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127);
}

struct HttpServer::State {
  HttpOptions options;
  std::vector<Route> routes = {};
  Listener server{options.threads, options.timeout_s};
  int port = 0;
  mutable std::mutex mutex = {};
  std::map<std::pair<std::string, int>, int64_t> counts = {};

  // Who asks: names that a page elsewhere may have pointed here, other sites, no token.
  void admit(const httplib::Request& request) const {
    if (request.get_header_value_count("Host") > 1) throw HttpError(400, "Host is given twice; name one");
    const std::string host = request.get_header_value("Host");
    if (options.token.empty() && is_loopback(options.host) && !is_loopback(host_of(host)))
      throw HttpError(403, "Host is not a name of this machine's loopback");
    if (request.has_header("Origin")) {
      const std::string origin = request.get_header_value("Origin");
      if (origin != "http://" + host && origin != "https://" + host)
        throw HttpError(403, "requests of other sites are not answered");
    }
    const auto open = [&](const Route& route) {
      return route.open && route.path == request.path && (request.method == route.method || request.method == "HEAD");
    };
    if (!trusted(request) && std::ranges::none_of(routes, open))
      throw HttpError(401, "Authorization: Bearer TOKEN is missing or wrong");
  }

  bool trusted(const httplib::Request& request) const {
    if (options.token.empty()) return true;
    const std::string given = request.get_header_value("Authorization");
    return given.starts_with("Bearer ") && same_token(given.substr(7), options.token);
  }

  // Before the body is read: of what is refused here none is.
  void welcome(const httplib::Request& request) const {
    admit(request);
    if (!body_length(request))
      throw HttpError(411, "Content-Length: missing or not one number; send the body in one piece");
    if (request.has_header("Content-Encoding"))
      throw HttpError(415, "Content-Encoding: not offered here; send the body as it is");
  }

  void answer(const Route& route, const nlohmann::json& schema, const httplib::Request& from,
              httplib::Response& to) const {
    Request request{.id = from.matches.size() > 1 ? from.matches[1].str() : "",
                    .body = from.body,
                    .schema = &schema,
                    .trusted = trusted(from)};
    for (const auto& [key, value] : from.params) request.query[key] = value;
    Reply reply = route.handle(request);
    to.status = reply.status;
    reply.headers.emplace("Content-Security-Policy", kPolicy);
    for (const auto& [name, value] : reply.headers) to.set_header(name, value);
    if (const auto file = reply.file) {
      file->seekg(0, std::ios::end);
      const auto size = static_cast<size_t>(file->tellg());
      to.set_content_provider(size, reply.type, [file](size_t offset, size_t length, auto& sink) {
        std::array<char, 1 << 16> part;
        file->seekg(static_cast<std::streamoff>(offset));
        return file->read(part.data(), static_cast<std::streamsize>(std::min(length, part.size()))) &&
               sink.write(part.data(), static_cast<size_t>(file->gcount()));
      });
      return;
    }
    if (!reply.stream) {
      to.set_content(std::move(reply.body), reply.type);
      return;
    }
    to.set_header("Cache-Control", "no-store");
    to.set_chunked_content_provider("text/event-stream", [stream = std::move(reply.stream)](size_t, auto& sink) {
      stream([&sink](std::string_view bytes) { return sink.is_writable() && sink.write(bytes.data(), bytes.size()); });
      sink.done();
      return true;
    });
  }

  // Does `work` and writes what it throws; true if it threw.
  template <class Work>
  bool fails(const std::string& route, httplib::Response& response, const Work& work) {
    bool failed = true;
    try {
      work();
      failed = false;
    } catch (const HttpError& error) {
      write_error(error, response);
    } catch (const Error& error) {
      write_error(to_http(error), response);
    } catch (const std::exception& error) {
      write_error({500, error.what()}, response);
    }
    const std::lock_guard lock(mutex);
    if (failed || !route.empty()) ++counts[{route, response.status}];
    return failed;
  }

  void add(const Route& route) {
    std::string pattern = route.path;
    if (const size_t begin = pattern.find('{'); begin != std::string::npos)
      pattern.replace(begin, pattern.find('}') - begin + 1, "([A-Za-z0-9._+-]{1,256})");
    const auto schema = std::make_shared<nlohmann::json>(route.request.empty() ? nlohmann::json::object()
                                                                               : object_schema(route.request));
    const auto handler = [this, &route, schema](const auto& request, auto& response) {
      fails(route.method + " " + route.path, response, [&] { answer(route, *schema, request, response); });
    };
    if (route.method == "GET") server.Get(pattern, handler);
    if (route.method == "POST") server.Post(pattern, handler);
    if (route.method == "PATCH") server.Patch(pattern, handler);
    if (route.method == "DELETE") server.Delete(pattern, handler);
  }
};

HttpServer::HttpServer(HttpOptions options) : state_(new State{std::move(options)}) {
  auto& server = state_->server;
  const auto& chosen = state_->options;
  server.set_payload_max_length(chosen.max_body);
  server.set_tcp_nodelay(true);
  server.set_default_headers({{"X-Content-Type-Options", "nosniff"},
                              {"Referrer-Policy", "no-referrer"},
                              {"Cross-Origin-Resource-Policy", "same-origin"}});
  server.set_pre_routing_handler([state = state_.get()](const httplib::Request& request, httplib::Response& response) {
    if (!state->fails("", response, [&] { state->welcome(request); }))
      return httplib::Server::HandlerResponse::Unhandled;
    if (body_length(request) != 0) response.set_header("Connection", "close");
    return httplib::Server::HandlerResponse::Handled;
  });
  server.set_error_handler([most = chosen.max_body](const httplib::Request&, httplib::Response& response) {
    const std::string text = response.status == 404   ? "no such path or method; see /openapi.json"
                             : response.status == 413 ? "a body of more than " + std::to_string(most) + " bytes"
                             : response.status == 414 ? "a path that is too long"
                                                      : "a request that cannot be read";
    if (response.body.empty()) write_error({response.status, text}, response);
  });
  state_->port = chosen.port;
  const bool bound = chosen.port == 0 ? (state_->port = server.bind_to_any_port(chosen.host)) > 0
                                      : server.bind_to_port(chosen.host, chosen.port);
  if (!bound)
    throw Error(ErrorClass::kIo, {chosen.host + ":" + std::to_string(chosen.port), "the address cannot be listened on",
                                  "an address of this machine and a free port", "choose another port; 0 picks one"});
  server.let_many_wait();
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const noexcept {
  return state_->port;
}

void HttpServer::serve(std::vector<Route> routes) {
  state_->routes = std::move(routes);
  for (const auto& route : state_->routes) state_->add(route);
  if (!state_->server.listen_after_bind())
    throw Error(ErrorClass::kIo, {state_->options.host + ":" + std::to_string(state_->port),
                                  "no connection can be taken", "an address that stays", "start the server again"});
}

bool HttpServer::running() const noexcept {
  return state_->server.is_running();
}

void HttpServer::stop() noexcept {
  state_->server.stop();
}

std::string HttpServer::metrics() const {
  const std::lock_guard lock(state_->mutex);
  std::string text = "# TYPE emend_http_requests_total counter\n";
  for (const auto& [key, count] : state_->counts)
    text += "emend_http_requests_total{route=\"" + key.first + "\",status=\"" + std::to_string(key.second) + "\"} " +
            std::to_string(count) + "\n";
  return text;
}

}  // namespace emend::tools::serve
