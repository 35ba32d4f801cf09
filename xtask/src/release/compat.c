/* Symbols of libstdc++ that GCC's headers since version 11 refer to and GCC 8's library (RHEL 8, Debian 10) lacks, in terms of older
 * ones. A further one is an error of the link, not of the machine that runs the program. */
#include <pthread.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern void copy_exception(void *self, const void *other);
extern void drop_exception(void *self);
extern void bad_array_length(void);
extern void open_stream(void *self, int mode);
extern void wait_for_change(void *self, void *lock);
/* By version: by name, these would be the inline functions of this program, which call the definitions below. */
__asm__(".symver copy_exception, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver drop_exception, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
__asm__(".symver bad_array_length, __cxa_throw_bad_array_new_length@CXXABI_1.3.8");
__asm__(".symver open_stream, "
        "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode@GLIBCXX_3.4.21");
__asm__(".symver wait_for_change, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

/* std::exception_ptr::_M_addref() and _M_release(): the copy's constructor counts one reference more, the destructor one less. */
HIDDEN void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void **self) {
    void *copy;
    copy_exception(&copy, self);
}
HIDDEN void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void **self) { drop_exception(self); }

/* std::__throw_bad_array_new_length() */
HIDDEN void _ZSt28__throw_bad_array_new_lengthv(void) { bad_array_length(); }

/* std::ostringstream::ostringstream(), with std::ios_base::out */
HIDDEN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void *self) { open_stream(self, 16); }

/* std::condition_variable::wait(std::unique_lock<std::mutex> &), which GCC 12's library has under another version. */
HIDDEN void _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void *self, void *lock) {
    wait_for_change(self, lock);
}

/* glibc 2.32: libstdc++'s headers count references without atomic operations while it is not 0. */
HIDDEN char __libc_single_threaded = 0;

/* glibc 2.30: waits until a time of the monotonic clock; older ones know that of the calendar. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *until) {
    struct timespec now, end;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &end);
    long nanoseconds = end.tv_nsec + until->tv_nsec - now.tv_nsec;
    end.tv_sec += until->tv_sec - now.tv_sec + (nanoseconds >= 1000000000) - (nanoseconds < 0);
    end.tv_nsec = nanoseconds + (nanoseconds < 0) * 1000000000 - (nanoseconds >= 1000000000) * 1000000000;
    return pthread_cond_timedwait(condition, mutex, &end);
}
