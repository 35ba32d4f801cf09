// Makes system calls on files below a folder fail: loaded into a program with LD_PRELOAD.
//
// FAULT_FOLDER  the folder
// FAULT_KIND    count: nothing fails; kill: half of the call is done and the process is killed; eio: one call fails with EIO;
//               enospc, erofs: one call and all that follow fail with ENOSPC or EROFS; short: that write and all that follow write half;
//               clock: from that call on, the time of day jumps to and fro by years
// FAULT_AT      the number of the first call that fails, from 1
// FAULT_COUNT   a file for the number of calls, at the end of the process
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { COUNT, KILL, EIO_ONCE, ENOSPC_ON, EROFS_ON, SHORT, CLOCK };

static const char *folder;
static enum kind kind;
static long at;
static atomic_long calls;

__attribute__((constructor)) static void begin(void) {
    folder = getenv("FAULT_FOLDER");
    const char *name = getenv("FAULT_KIND");
    const char *number = getenv("FAULT_AT");
    at = number ? atol(number) : 0;
    if (!name || !strcmp(name, "count")) kind = COUNT;
    else if (!strcmp(name, "kill")) kind = KILL;
    else if (!strcmp(name, "eio")) kind = EIO_ONCE;
    else if (!strcmp(name, "enospc")) kind = ENOSPC_ON;
    else if (!strcmp(name, "erofs")) kind = EROFS_ON;
    else if (!strcmp(name, "clock")) kind = CLOCK;
    else kind = SHORT;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("FAULT_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", atomic_load(&calls));
    fclose(file);
}

static int below(const char *path) {
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static int fd_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return below(path);
}

// Whether this call fails, with errno set; `grows` is whether it needs room on the disk.
static int fails(int grows) {
    long number = atomic_fetch_add(&calls, 1) + 1;
    switch (kind) {
    case EIO_ONCE:
        errno = EIO;
        return number == at;
    case ENOSPC_ON:
        errno = ENOSPC;
        return grows && number >= at;
    case EROFS_ON:
        errno = EROFS;
        return number >= at;
    case KILL:
        if (number == at) kill(getpid(), SIGKILL);
        return 0;
    default:
        return 0;
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// Bytes of this write that are to be written, or -1 if it fails.
static ssize_t allowed(int fd, size_t size) {
    if (!fd_below(fd)) return (ssize_t)size;
    if (kind == KILL && atomic_load(&calls) + 1 == at) return (ssize_t)(size / 2);
    if (fails(1)) return -1;
    return kind == SHORT && atomic_load(&calls) >= at && size > 1 ? (ssize_t)(size / 2) : (ssize_t)size;
}

// The process dies after half of a write.
static ssize_t after_half(int fd, ssize_t written) {
    if (kind == KILL && fd_below(fd)) fails(1);
    return written;
}

#define WRITE(call)                                   \
    ssize_t room = allowed(fd, size);                 \
    if (room < 0) return -1;                          \
    int torn = kind == KILL && room < (ssize_t)size;  \
    ssize_t written = call;                           \
    return torn ? after_half(fd, written) : written

ssize_t write(int fd, const void *bytes, size_t size) {
    WRITE(REAL(write)(fd, bytes, room));
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    WRITE(REAL(pwrite)(fd, bytes, room, offset));
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    WRITE(REAL(pwrite64)(fd, bytes, room, offset));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!fd_below(fd)) return REAL(writev)(fd, parts, count);
    if (fails(1)) return -1;
    if (kind == SHORT && atomic_load(&calls) >= at && count > 1) return REAL(writev)(fd, parts, count / 2);
    return REAL(writev)(fd, parts, count);
}

ssize_t copy_file_range(int in, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags) {
    WRITE(REAL(copy_file_range)(in, from, fd, to, room, flags));
}

#define ON_FD(result, name, signature, arguments, grows)   \
    result name signature {                                \
        if (fd_below(fd) && fails(grows)) return -1;       \
        return REAL(name) arguments;                       \
    }

ON_FD(int, fsync, (int fd), (fd), 0)
ON_FD(int, fdatasync, (int fd), (fd), 0)
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size), 1)
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size), 1)

#define ON_PATH(name, signature, arguments, path, grows)   \
    int name signature {                                   \
        if (below(path) && fails(grows)) return -1;        \
        return REAL(name) arguments;                       \
    }

ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), path, 1)
ON_PATH(rmdir, (const char *path), (path), path, 0)
ON_PATH(unlink, (const char *path), (path), path, 0)
ON_PATH(rename, (const char *from, const char *to), (from, to), to, 0)
ON_PATH(link, (const char *from, const char *to), (from, to), to, 1)

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;     \
        va_end(rest);                                                                 \
        if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && below(path) && fails(flags & O_CREAT)) return -1; \
        return REAL(name)(path, flags, mode);                                         \
    }

OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    static atomic_long asked;
    static const long years[] = {12, -7, 0, 40, -30};
    int result = REAL(clock_gettime)(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && kind == CLOCK && atomic_load(&calls) >= at)
        now->tv_sec += years[atomic_fetch_add(&asked, 1) % 5] * 31556952;
    return result;
}
