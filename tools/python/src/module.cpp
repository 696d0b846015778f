#include <fmt/format.h>
#include <nanobind/nanobind.h>

#include <exception>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <typeinfo>

#include "sim/source/policy_source.hpp"
#include "tools/python/src/bindings.hpp"
#include "traces/base/message.hpp"
#include "traces/base/text.hpp"

namespace {

/// Raises an error with the message that the command would print. brief_line() limits its length
/// and replaces control characters and invalid UTF-8, which Python would not accept.
void raise(PyObject* kind, std::string_view message) {
  PyErr_SetString(kind, kvlab::brief_line(message).c_str());
}

/// Raises a compiler's message, which has several lines.
void raise_not_compiled(std::string_view message) {
  std::string lines;
  for (const std::string& line : kvlab::split_list(message, '\n'))
    lines += (lines.empty() ? "" : "\n") + kvlab::brief_line(line);
  PyErr_SetString(PyExc_ValueError, lines.c_str());
}

/// Raises kvlab's errors in Python, with the messages of the command. A failed conversion of an
/// argument (std::bad_cast) becomes a ValueError without the argument's name. It is rare, because
/// the package checks arguments by name before it calls the extension. nanobind handles all other
/// errors.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const nanobind::builtin_exception&) {
    throw;
  } catch (const std::bad_cast&) {
    PyErr_SetString(PyExc_ValueError, "an argument has an unexpected type");
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError,
                    "out of memory; a shorter input or fewer configurations may fit");
  } catch (const kvlab::DoesNotCompile& error) {
    raise_not_compiled(error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    raise(PyExc_RuntimeError,
          fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::invalid_argument& error) {
    raise(PyExc_ValueError, error.what());
  } catch (const std::runtime_error& error) {
    raise(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

NB_MODULE(_kvlab, module) {
  nanobind::register_exception_translator(translate);
  module.doc() = "The compiled half of kvlab.";
  nanobind::set_leak_warnings(false);  // Python policies live as long as the process
  module.attr("version") = KVLAB_RELEASE;
  kvlab::python::bind_trace(module);
  kvlab::python::bind_trace_writer(module);
  kvlab::python::bind_arrays(module);
  kvlab::python::bind_policies(module);
  kvlab::python::bind_projections(module);
  kvlab::python::bind_replay(module);
  kvlab::python::bind_cache_request(module);
  kvlab::python::bind_caches(module);
  kvlab::python::bind_command(module);
}
