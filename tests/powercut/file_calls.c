/* Records the calls of a process that change the files below a folder, and makes one of them fail.

   Preloaded (LD_PRELOAD), it stands between the program and the C library: it sees the calls of Python and of C++
   threads alike. It does nothing until `calls_record`. Calls below the folder run one at a time, so that the record has
   the order in which they took effect. `file_calls.py` describes and reads the record. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE, WRITE, SYNC, MKDIR, RMDIR, UNLINK, RENAME, LINK, MARK, OPEN, CLOSE };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length; /* 0: off */
static int record = -1;

/* The call that fails: the `fail_at`-th from now on of the kinds in `fail_kinds` whose path has an end, and with
   `fail_lasts` all later ones. */
static long fail_at, calls;
static unsigned fail_kinds;
static int fail_errno, fail_lasts;
static char fail_end[PATH_MAX], failed[2 * PATH_MAX];

struct head {
    uint32_t kind, thread, first, second; /* lengths of the two paths */
    uint64_t inode;
    int64_t at;
    uint64_t size; /* of the data */
};

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void put(const void *data, size_t size) {
    while (size > 0) {
        ssize_t done = syscall(SYS_write, record, data, size);
        if (done <= 0) abort(); /* an incomplete record is worse than none */
        data = (const char *)data + done;
        size -= done;
    }
}

static void note(int kind, uint64_t inode, int64_t at, const char *a, const char *b, const void *data, size_t size) {
    struct head head = {kind, (uint32_t)syscall(SYS_gettid), strlen(a), strlen(b), inode, at, size};
    if (record < 0) return;
    put(&head, sizeof head);
    put(a, head.first);
    put(b, head.second);
    put(data, size);
}

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length >= 0;
}

static int fd_below(int fd, char *path) { return root_length && path_of(fd, path) && below(path); }

/* The absolute path of an argument; 0 if it is not below the folder. */
static int at_below(int folder, const char *given, char *path) {
    if (!root_length || !given) return 0;
    if (given[0] == '/') {
        snprintf(path, PATH_MAX, "%s", given);
    } else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(folder, base)) return 0;
        if (!strcmp(given, "."))
            snprintf(path, PATH_MAX, "%s", base);
        else
            snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, given);
    }
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    return below(path);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

/* Whether this call shall fail. */
static int fails(int kind, const char *path) {
    size_t length = strlen(path), end = strlen(fail_end);
    if (!fail_at || !(fail_kinds >> kind & 1) || length < end || strcmp(path + length - end, fail_end)) return 0;
    calls++;
    if (calls != fail_at && !(fail_lasts && calls > fail_at)) return 0;
    if (!failed[0]) snprintf(failed, sizeof failed, "%d %s", kind, path);
    errno = fail_errno;
    return 1;
}

#define LOCKED(result, call)        \
    pthread_mutex_lock(&lock);      \
    result = call;                  \
    int saved_errno = errno;        \
    pthread_mutex_unlock(&lock);    \
    errno = saved_errno;            \
    return result

static int open_below(int folder, const char *given, int flags, mode_t mode, const char *path) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT, is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    struct stat found;
    if (fails(writes ? CREATE : OPEN, path)) return -1;
    int existed = !fstatat(folder, given, &found, 0);
    int fd = syscall(SYS_openat, folder, given, flags, mode);
    if (fd < 0 || !writes) return fd;
    if (is_unnamed)
        note(CREATE, inode_of(fd), 0, "", "", "", 0);
    else if (!existed)
        note(CREATE, inode_of(fd), 0, path, "", "", 0);
    else if (flags & O_TRUNC && S_ISREG(found.st_mode))
        note(TRUNCATE, inode_of(fd), 0, "", "", "", 0);
    return fd;
}

static int any_open(int folder, const char *given, int flags, mode_t mode) {
    char path[PATH_MAX];
    int fd;
    if (!at_below(folder, given, path)) return syscall(SYS_openat, folder, given, flags, mode);
    LOCKED(fd, open_below(folder, given, flags, mode, path));
}

static mode_t mode_in(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN_FUNCTION(name)                    \
    int name(const char *path, int flags, ...) { \
        va_list rest;                          \
        va_start(rest, flags);                 \
        mode_t mode = mode_in(flags, rest);    \
        va_end(rest);                          \
        return any_open(AT_FDCWD, path, flags, mode); \
    }
#define OPENAT_FUNCTION(name)                             \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode_t mode = mode_in(flags, rest);               \
        va_end(rest);                                     \
        return any_open(folder, path, flags, mode);       \
    }
OPEN_FUNCTION(open)
OPEN_FUNCTION(open64)
OPENAT_FUNCTION(openat)
OPENAT_FUNCTION(openat64)
int creat(const char *path, mode_t mode) { return any_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }
int __open_2(const char *path, int flags) { return any_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return any_open(AT_FDCWD, path, flags, 0); }
int __openat_2(int folder, const char *path, int flags) { return any_open(folder, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return any_open(folder, path, flags, 0); }

/* at < 0: at the file's position, or at its end if it appends. */
static ssize_t write_below(int fd, const struct iovec *parts, int count, off_t at, const char *path) {
    if (fails(WRITE, path)) return -1;
    ssize_t done = at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
    if (done <= 0) return done;
    off_t from = at < 0 ? lseek(fd, 0, SEEK_CUR) - done : at;
    size_t left = done;
    for (int i = 0; i < count && left > 0; i++) {
        size_t size = parts[i].iov_len < left ? parts[i].iov_len : left;
        if (size) note(WRITE, inode_of(fd), from, path, "", parts[i].iov_base, size);
        from += size;
        left -= size;
    }
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    ssize_t done;
    struct iovec part = {(void *)data, size};
    if (!fd_below(fd, path)) return syscall(SYS_write, fd, data, size);
    LOCKED(done, write_below(fd, &part, 1, -1, path));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    ssize_t done;
    if (!fd_below(fd, path)) return syscall(SYS_writev, fd, parts, count);
    LOCKED(done, write_below(fd, parts, count, -1, path));
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    char path[PATH_MAX];
    ssize_t done;
    if (!fd_below(fd, path)) return syscall(SYS_pwritev, fd, parts, count, at, 0);
    LOCKED(done, write_below(fd, parts, count, at, path));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return pwritev(fd, parts, count, at); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    struct iovec part = {(void *)data, size};
    return pwritev(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }

/* Callers of these copy by reads and writes if they are refused. */
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    char path[PATH_MAX];
    if (fd_below(to, path)) return errno = EINVAL, -1;
    return REAL(sendfile64)(to, from, at, size);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return sendfile64(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (fd_below(to, path)) return errno = ENOSYS, -1;
    return syscall(SYS_copy_file_range, from, a, to, b, size, flags);
}

static int sync_below(int fd, int number, const char *path) {
    if (fails(SYNC, path)) return -1;
    int result = syscall(number, fd);
    if (!result) note(SYNC, inode_of(fd), 0, path, "", "", 0);
    return result;
}
static int any_sync(int fd, int number) {
    char path[PATH_MAX];
    int result;
    if (!fd_below(fd, path)) return syscall(number, fd);
    LOCKED(result, sync_below(fd, number, path));
}
int fsync(int fd) { return any_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return any_sync(fd, SYS_fdatasync); }

static int truncate_below(int fd, off_t size, const char *path) {
    if (fails(TRUNCATE, path)) return -1;
    int result = syscall(SYS_ftruncate, fd, size);
    if (!result) note(TRUNCATE, inode_of(fd), size, path, "", "", 0);
    return result;
}
int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    int result;
    if (!fd_below(fd, path)) return syscall(SYS_ftruncate, fd, size);
    LOCKED(result, truncate_below(fd, size, path));
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

static int close_below(int fd, const char *path) {
    int flags = fcntl(fd, F_GETFL), refused = (flags & O_ACCMODE) != O_RDONLY && fails(CLOSE, path);
    int result = syscall(SYS_close, fd);
    return refused ? (errno = fail_errno, -1) : result;
}
int close(int fd) {
    char path[PATH_MAX];
    int result;
    if (!fd_below(fd, path)) return syscall(SYS_close, fd);
    LOCKED(result, close_below(fd, path));
}

static int mkdir_below(int folder, const char *given, mode_t mode, const char *path) {
    struct stat found = {0};
    if (fails(MKDIR, path)) return -1;
    int result = syscall(SYS_mkdirat, folder, given, mode);
    if (!result) {
        fstatat(folder, given, &found, AT_SYMLINK_NOFOLLOW);
        note(MKDIR, found.st_ino, 0, path, "", "", 0);
    }
    return result;
}
int mkdirat(int folder, const char *given, mode_t mode) {
    char path[PATH_MAX];
    int result;
    if (!at_below(folder, given, path)) return syscall(SYS_mkdirat, folder, given, mode);
    LOCKED(result, mkdir_below(folder, given, mode, path));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static int unlink_below(int folder, const char *given, int flags, const char *path) {
    int kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    if (fails(kind, path)) return -1;
    int result = syscall(SYS_unlinkat, folder, given, flags);
    if (!result) note(kind, 0, 0, path, "", "", 0);
    return result;
}
int unlinkat(int folder, const char *given, int flags) {
    char path[PATH_MAX];
    int result;
    if (!at_below(folder, given, path)) return syscall(SYS_unlinkat, folder, given, flags);
    LOCKED(result, unlink_below(folder, given, flags, path));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    struct stat found;
    return !lstat(path, &found) && S_ISDIR(found.st_mode) ? rmdir(path) : unlink(path);
}

static int rename_below(int from, const char *old, int to, const char *new, unsigned flags, const char *a, const char *b) {
    if (fails(RENAME, a)) return -1;
    int result = syscall(SYS_renameat2, from, old, to, new, flags);
    if (!result) note(RENAME, 0, 0, a, b, "", 0);
    return result;
}
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int result, is_below = at_below(from, old, a);
    if (!at_below(to, new, b) || !is_below) return syscall(SYS_renameat2, from, old, to, new, flags);
    LOCKED(result, rename_below(from, old, to, new, flags, a, b));
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

static int link_below(int from, const char *old, int to, const char *new, int flags, const char *a, const char *b) {
    if (fails(LINK, b)) return -1;
    int result = syscall(SYS_linkat, from, old, to, new, flags);
    if (!result) note(LINK, 0, 0, a, b, "", 0);
    return result;
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int result, is_below = at_below(from, old, a);
    if (!at_below(to, new, b) || !is_below) return syscall(SYS_linkat, from, old, to, new, flags);
    LOCKED(result, link_below(from, old, to, new, flags, a, b));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

/* Begin: record calls below a folder into a file that is open for appending; fd < 0 to record nothing. */
void calls_record(const char *folder, int fd) {
    pthread_mutex_lock(&lock);
    record = fd;
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    pthread_mutex_unlock(&lock);
}

/* Write a line of text into the record, as of the calling thread. */
void calls_mark(const char *text) {
    pthread_mutex_lock(&lock);
    if (root_length) note(MARK, 0, 0, text, "", "", 0);
    pthread_mutex_unlock(&lock);
}

/* Make the n-th call from now on fail, of those of some kinds (a bit each) whose path ends with `end`; with `lasts` all
   later ones, too. 0: none. */
void calls_fail(long at, unsigned kinds, const char *end, int number, int lasts) {
    pthread_mutex_lock(&lock);
    snprintf(fail_end, sizeof fail_end, "%s", end);
    fail_at = at, calls = 0, fail_kinds = kinds, fail_errno = number, fail_lasts = lasts, failed[0] = 0;
    pthread_mutex_unlock(&lock);
}

/* The kind and path of the first call that failed; "" if none did. */
const char *calls_failed(void) { return failed; }
